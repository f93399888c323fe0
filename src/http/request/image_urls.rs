//! Downloads images from `http` and `https` URLs. Only hosts that the operator lists are allowed, so that a request
//! cannot make the server read from its own network.

use crate::http::{ApiError, layers::MemoryPermit};
use moestro_engine::ImageProcessor;
use moestro_model::error::ImageError;
use std::{
    fmt::Display,
    io::Read,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    sync::Arc,
    time::Duration,
};
use tokio::{
    sync::Semaphore,
    time::{Instant, timeout_at},
};
use ureq::{
    Agent, BodyReader,
    config::Config,
    http::Uri,
    unversioned::{
        resolver::{DefaultResolver, ResolvedSocketAddrs, Resolver},
        transport::{DefaultConnector, NextTimeout, time},
    },
};

/// Maximum time for all downloads of one request. Includes waiting for a place.
const TIMEOUT: Duration = Duration::from_secs(20);
/// Maximum time to download one image of a message that is not new. Such an image may have failed before, and each later
/// turn of the conversation waits for it again.
const EARLIER_IMAGE_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum time to download all images of messages that are not new.
const EARLIER_IMAGES_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum time to connect. Connecting cannot be cancelled, so it may keep its place for this time after its client has
/// left.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Memory in bytes that a download takes at once, if the host declares no larger size.
const PIECE: usize = 1 << 20;
/// Reason why an image is not shown that the server cannot hold. Completes "the image ...".
const TOO_MUCH_MEMORY: &str = "is larger than the memory that the server has for requests; send a smaller one";
/// Maximum number of downloads that run at the same time, for all requests together.
const PLACES: usize = 4;

/// The hosts that images may be fetched from. By default, no host is allowed.
#[derive(Debug)]
pub struct ImageUrls {
    /// Each entry is `host` for the scheme's default port, or `host:port`, in lower case.
    hosts: Vec<String>,
    places: Arc<Semaphore>,
}

/// Downloads the images of one request.
pub struct ImageDownloads {
    urls: Arc<ImageUrls>,
    /// The time that is left for downloads. Decoding takes none of it.
    time: Duration,
    /// The time that is left for downloads of images of messages that are not new.
    earlier_time: Duration,
}

/// One download, from a host that is allowed.
struct Download {
    agent: Agent,
    uri: Uri,
    host: String,
}

/// The body of an answer that is being read.
struct ImageBody {
    host: String,
    reader: BodyReader<'static>,
    /// The length that the host has declared, or 0.
    declared: usize,
    image: Vec<u8>,
    has_ended: bool,
}

/// Interrupts a download when dropped.
struct InterruptOnDrop(Agent);

impl ImageDownloads {
    pub fn new(urls: Arc<ImageUrls>) -> Self {
        Self { urls, time: TIMEOUT, earlier_time: EARLIER_IMAGES_TIMEOUT }
    }

    /// Downloads an image. Returns the image and a permit of the request for its bytes, which waits for memory that other
    /// requests hold. A host that has not answered takes no memory. An image that is not new has less time. If the caller
    /// is dropped, the download ends. The thread of the download holds its memory and its place until it has ended.
    ///
    /// # Errors
    /// The inner error is the reason why the image is not shown. The text completes "the image ...". The outer error ends
    /// the request.
    pub async fn fetch(
        &mut self,
        url: String,
        is_new: bool,
        permit: &MemoryPermit,
    ) -> Result<Result<(Vec<u8>, MemoryPermit), String>, ApiError> {
        let download = match self.urls.download(&url) {
            Ok(download) => download,
            Err(why) => return Ok(Err(why)),
        };
        let too_slow = || {
            if is_new {
                return format!("cannot be fetched: the images of a request took more than {} s", TIMEOUT.as_secs());
            }
            // The same text in each turn, so that the prompt cache keeps the messages after the image.
            "took too long to fetch".into()
        };
        let time = if is_new { self.time } else { self.time.min(self.earlier_time).min(EARLIER_IMAGE_TIMEOUT) };
        if time.is_zero() {
            return Ok(Err(too_slow()));
        }
        let start = Instant::now();
        let deadline = start + time;
        let fetch = async {
            // The wait for a place takes no thread and no memory.
            let Ok(place) = timeout_at(deadline, self.urls.places.clone().acquire_owned()).await else {
                return if is_new { Err(ApiError::downloads_busy()) } else { Ok(Err(too_slow())) };
            };
            let mut own = permit.reserve(0)?;
            let _interrupt = InterruptOnDrop(download.agent.clone());
            let start = move || Ok((download.start(deadline.saturating_duration_since(Instant::now()))?, place));
            // The download is not a step of the permit, because a slow host would delay the steps of other requests.
            let Ok(answer) = timeout_at(deadline, own.run_beside_steps((), start)).await else {
                return Ok(Err(too_slow()));
            };
            let mut answer = answer?;
            loop {
                let (mut body, place) = match answer {
                    Ok(begun) => begun,
                    Err(why) => return Ok(Err(why)),
                };
                if body.has_ended {
                    body.image.shrink_to_fit();
                    own.resize(body.image.capacity())?;
                    return Ok(Ok((body.image, own)));
                }
                match own.grow_before(body.piece(), deadline).await {
                    Err(error) if error.status == 413 => return Ok(Err(TOO_MUCH_MEMORY.to_owned())),
                    Err(error) if error.status == 503 && !is_new => return Ok(Err(too_slow())),
                    grown => grown?,
                }
                let read = move || body.read_piece().map(|()| (body, place));
                let Ok(read) = timeout_at(deadline, own.run_beside_steps((), read)).await else {
                    return Ok(Err(too_slow()));
                };
                answer = read?;
            }
        };
        let fetched = fetch.await;
        self.time = self.time.saturating_sub(start.elapsed());
        if !is_new {
            self.earlier_time = self.earlier_time.saturating_sub(start.elapsed());
        }
        fetched
    }
}

impl Drop for InterruptOnDrop {
    fn drop(&mut self) {
        self.0.clone().shutdown();
    }
}

impl Download {
    /// Sends the request. Blocks until the head of the answer has arrived. Follows no redirects.
    fn start(self, timeout: Duration) -> Result<ImageBody, String> {
        let request = self.agent.get(self.uri).header("accept-encoding", "identity");
        let request = request.config().timeout_global(Some(timeout)).http_status_as_error(false).build();
        let response = request.call().map_err(|error| failed(&self.host, &error))?;
        if !response.status().is_success() {
            return Err(format!("cannot be fetched from its URL: status {}", response.status().as_u16()));
        }
        let body = response.into_body();
        let declared = body.content_length().map_or(0, |bytes| usize::try_from(bytes).unwrap_or(usize::MAX));
        Ok(ImageBody { host: self.host, reader: body.into_reader(), declared, image: Vec::new(), has_ended: false })
    }
}

impl ImageBody {
    /// Number of bytes that the next read takes: all of a body whose length is known, and one more to see its end. Each
    /// further piece doubles the size, so that a download seldom waits for memory while it holds some.
    fn piece(&self) -> usize {
        let max = ImageProcessor::MAX_ENCODED_BYTES;
        (self.declared.clamp(PIECE, max) + 1).max(self.image.len()).min(max + 1 - self.image.len())
    }

    /// Reads the next piece. Blocks. Reads at most one byte more than the limit, also of a body that is compressed
    /// although the request forbids it.
    fn read_piece(&mut self) -> Result<(), String> {
        let max = ImageProcessor::MAX_ENCODED_BYTES;
        let piece = self.piece();
        self.image.reserve_exact(piece);
        let read = self.reader.by_ref().take(piece as u64).read_to_end(&mut self.image);
        self.has_ended = read.map_err(|error| failed(&self.host, &error))? < piece;
        if self.image.len() > max {
            return Err(ImageError::Bytes { bytes: self.declared.max(self.image.len()), max }.to_string());
        }
        Ok(())
    }
}

/// Logs why a download failed. Returns the reason for the client, which does not say what the host is.
fn failed(host: &str, error: &dyn Display) -> String {
    tracing::info!(host, %error, "cannot fetch an image");
    "cannot be fetched from its URL".to_owned()
}

impl Default for ImageUrls {
    fn default() -> Self {
        Self::new(&[])
    }
}

impl ImageUrls {
    pub fn new(hosts: &[String]) -> Self {
        let hosts = hosts.iter().map(|host| host.trim().to_ascii_lowercase()).collect();
        Self { hosts, places: Arc::new(Semaphore::new(PLACES)) }
    }

    /// Downloads an image. Blocks, and counts no memory.
    ///
    /// # Errors
    /// Returns the reason why the image is not shown. The text completes "the image ...".
    pub fn fetch(&self, url: &str) -> Result<Vec<u8>, String> {
        let mut body = self.download(url)?.start(TIMEOUT)?;
        while !body.has_ended {
            body.read_piece()?;
        }
        Ok(body.image)
    }

    /// Prepares a download, without any input or output.
    fn download(&self, url: &str) -> Result<Download, String> {
        let uri: Uri = url.parse().map_err(|_| "has an invalid URL".to_owned())?;
        let host = self.allowed_host(&uri)?;
        let config = Agent::config_builder()
            .max_redirects(0)
            .max_redirects_will_error(false)
            .timeout_connect(Some(CONNECT_TIMEOUT))
            .proxy(None)
            .user_agent("moestro")
            .build();
        let resolver = PublicResolver { allows_private: is_address_or_local(&host) };
        Ok(Download { agent: Agent::with_parts(config, DefaultConnector::default(), resolver), uri, host })
    }

    /// The host of the URL, if the operator lists it.
    fn allowed_host(&self, uri: &Uri) -> Result<String, String> {
        let off = "has an http URL; send it as a data: URL, or start the server with --image-urls HOST";
        let (Some(scheme), Some(authority)) = (uri.scheme_str(), uri.authority()) else { return Err(off.into()) };
        if authority.as_str().contains('@') {
            return Err("has a URL with a user name".into());
        }
        let host = authority.host().to_ascii_lowercase();
        let default_port = if scheme == "https" { 443 } else { 80 };
        let port = authority.port_u16().unwrap_or(default_port);
        let is_listed = self
            .hosts
            .iter()
            .any(|listed| *listed == format!("{host}:{port}") || (*listed == host && port == default_port));
        if is_listed { Ok(host) } else { Err(off.into()) }
    }
}

/// True for an IP address and for `localhost`. Other hosts must not resolve to private addresses.
fn is_address_or_local(host: &str) -> bool {
    host == "localhost" || host.trim_matches(['[', ']']).parse::<IpAddr>().is_ok()
}

/// Resolves names to public addresses only. The resolver itself checks the addresses, because a second lookup for the
/// connection could return another address.
#[derive(Debug)]
struct PublicResolver {
    allows_private: bool,
}

impl Resolver for PublicResolver {
    /// Resolves on the thread of the download. With a timeout, `DefaultResolver` would start a thread and not wait for it.
    /// A lookup cannot be interrupted, so it keeps its place until the system's resolver gives up.
    fn resolve(&self, uri: &Uri, config: &Config, timeout: NextTimeout) -> Result<ResolvedSocketAddrs, ureq::Error> {
        let timeout = NextTimeout { after: time::Duration::NotHappening, ..timeout };
        let found = DefaultResolver::default().resolve(uri, config, timeout)?;
        let mut public = self.empty();
        for address in found.iter().filter(|address| self.allows_private || is_public(address)).take(16) {
            public.push(*address);
        }
        if public.is_empty() { Err(ureq::Error::HostNotFound) } else { Ok(public) }
    }
}

fn is_public(address: &SocketAddr) -> bool {
    match address.ip() {
        IpAddr::V4(ip) => is_public_v4(ip),
        IpAddr::V6(ip) => match ip.to_ipv4_mapped() {
            Some(ip) => is_public_v4(ip),
            None => is_public_v6(ip),
        },
    }
}

fn is_public_v4(ip: Ipv4Addr) -> bool {
    let [a, b, ..] = ip.octets();
    let is_shared = a == 100 && (64..128).contains(&b);
    let is_benchmark = a == 198 && (18..20).contains(&b);
    let is_special = ip.is_private() || ip.is_loopback() || ip.is_link_local() || ip.is_documentation();
    !(is_special || is_shared || is_benchmark || a == 0 || a >= 224 || (a == 192 && b == 0 && ip.octets()[2] == 0))
}

fn is_public_v6(ip: Ipv6Addr) -> bool {
    let [first, second, ..] = ip.segments();
    // Only 2000::/3 is global. 6to4 and Teredo embed other addresses.
    let is_global = first & 0xe000 == 0x2000;
    is_global && first != 0x2002 && !(first == 0x2001 && (second == 0 || second == 0xdb8))
}

#[cfg(test)]
mod tests;

//! Downloads images from `http` and `https` URLs. Only hosts that the operator lists are allowed, so that a request
//! cannot make the server read from its own network.

use crate::http::{ApiError, layers::MemoryPermit};
use moestro_engine::ImageProcessor;
use moestro_model::error::ImageError;
use std::{
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
    Agent,
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
    /// The end of the time for all images. `None` before the first download.
    deadline: Option<Instant>,
    /// The time that is left for downloads of images of messages that are not new.
    earlier_time: Duration,
}

/// One download, from a host that is allowed.
#[derive(Clone)]
struct Download {
    agent: Agent,
    uri: Uri,
    host: String,
}

/// Interrupts a download when dropped.
struct InterruptOnDrop(Agent);

impl ImageDownloads {
    pub fn new(urls: Arc<ImageUrls>) -> Self {
        Self { urls, deadline: None, earlier_time: EARLIER_IMAGES_TIMEOUT }
    }

    /// Downloads an image. Returns the image and a permit of the request for its bytes. An image that is not new has less
    /// time. If the caller is dropped, the download ends. The thread of the download holds its memory and its place until
    /// it has ended.
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
        let deadline = *self.deadline.get_or_insert_with(|| Instant::now() + TIMEOUT);
        let too_slow = || {
            if is_new {
                return format!("cannot be fetched: the images of a request took more than {} s", TIMEOUT.as_secs());
            }
            // The same text in each turn, so that the prompt cache keeps the messages after the image.
            "took too long to fetch".into()
        };
        if Instant::now() >= deadline || (!is_new && self.earlier_time.is_zero()) {
            return Ok(Err(too_slow()));
        }
        let start = Instant::now();
        let deadline =
            if is_new { deadline } else { deadline.min(start + EARLIER_IMAGE_TIMEOUT.min(self.earlier_time)) };
        let fetch = async {
            // The wait for a place takes no thread and no memory.
            let Ok(place) = timeout_at(deadline, self.urls.places.clone().acquire_owned()).await else {
                return if is_new { Err(ApiError::downloads_busy()) } else { Ok(Err(too_slow())) };
            };
            let mut own = permit.reserve(ImageProcessor::MAX_ENCODED_BYTES)?;
            let _interrupt = InterruptOnDrop(download.agent.clone());
            let work = move || download.run(deadline.saturating_duration_since(Instant::now()));
            // The download is not a step of the permit, because a slow host would delay the steps of other requests.
            let Ok(fetched) = timeout_at(deadline, own.run_beside_steps(place, work)).await else {
                return Ok(Err(too_slow()));
            };
            let fetched = fetched?;
            own.resize(fetched.as_ref().map_or(0, Vec::capacity))?;
            Ok(fetched.map(|image| (image, own)))
        };
        let fetched = fetch.await;
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
    /// Downloads the image. Blocks. Follows no redirects. Reads at most one byte more than the limit, also of a body that
    /// is compressed although the request forbids it.
    fn run(&self, timeout: Duration) -> Result<Vec<u8>, String> {
        let failed = |error: &dyn std::fmt::Display| {
            tracing::info!(host = self.host, %error, "cannot fetch an image");
            "cannot be fetched from its URL".to_owned()
        };
        let request = self.agent.get(self.uri.clone()).header("accept-encoding", "identity");
        let request = request.config().timeout_global(Some(timeout)).build();
        let response = request.call().map_err(|error| failed(&error))?;
        if !response.status().is_success() {
            return Err(format!("cannot be fetched from its URL: status {}", response.status().as_u16()));
        }
        let max = ImageProcessor::MAX_ENCODED_BYTES;
        let body = response.into_body();
        let declared = body.content_length().map_or(max, |bytes| usize::try_from(bytes).unwrap_or(usize::MAX));
        let mut image = Vec::with_capacity(declared.min(max) + 1);
        body.into_reader().take(max as u64 + 1).read_to_end(&mut image).map_err(|error| failed(&error))?;
        if image.len() > max {
            return Err(ImageError::Bytes { bytes: declared.max(image.len()), max }.to_string());
        }
        image.shrink_to_fit();
        Ok(image)
    }
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
        self.download(url)?.run(TIMEOUT)
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
mod tests {
    use super::*;
    use crate::http::layers::RequestMemory;
    use moestro_base::metrics::Metrics;
    use std::{io::Write, net::TcpListener};
    use tokio::task::JoinHandle;

    #[test]
    fn only_listed_hosts_are_allowed() {
        let urls = ImageUrls::new(&["Images.example.com".into(), "localhost:8080".into(), "[::1]:81".into()]);
        let host = |url: &str| urls.allowed_host(&url.parse().unwrap());
        for (url, expected) in [
            ("https://images.example.com/a.png", "images.example.com"),
            ("http://IMAGES.example.com:80/a", "images.example.com"),
            ("http://localhost:8080/x", "localhost"),
            ("http://[::1]:81/x", "[::1]"),
        ] {
            assert_eq!(host(url).as_deref(), Ok(expected), "{url}");
        }
        for url in [
            "https://images.example.com:8443/a",
            "http://localhost/x",
            "http://evil.example.com/",
            "http://images.example.com.evil.com/",
            "http://images.example.com@evil.com/",
            "http://user@images.example.com/",
            "http://127.0.0.1/",
            "http://[::ffff:169.254.169.254]/latest/meta-data",
        ] {
            assert!(host(url).is_err(), "{url}");
        }
        assert!(ImageUrls::default().fetch("http://localhost:8080/x").unwrap_err().contains("--image-urls"));
    }

    /// Answers one request on a free port with `response`. Returns the port.
    fn answer_once(response: Vec<u8>) -> u16 {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let _ = stream.read(&mut [0; 4096]);
            let _ = stream.write_all(&response);
        });
        port
    }

    /// Fetches an image from this host, which is allowed.
    fn fetch_from(host: &str) -> Result<Vec<u8>, String> {
        ImageUrls::new(&[host.to_owned()]).fetch(&format!("http://{host}/a.png"))
    }

    #[test]
    fn fetch_follows_no_redirect() {
        let fetch = |response: Vec<u8>| fetch_from(&format!("127.0.0.1:{}", answer_once(response)));
        let ok = |length: usize| format!("HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n").into_bytes();
        assert_eq!(fetch([ok(2), b"hi".to_vec()].concat()).unwrap(), b"hi");
        let target = answer_once([ok(6), b"secret".to_vec()].concat());
        let redirect =
            format!("HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:{target}/\r\nContent-Length: 0\r\n\r\n");
        assert!(fetch(redirect.into_bytes()).unwrap_err().contains("302"));
        let length = ImageProcessor::MAX_ENCODED_BYTES + 1;
        assert!(fetch([ok(length), vec![0; length]].concat()).is_err(), "too long");
    }

    #[test]
    fn compressed_body_is_read_up_to_limit() {
        let zeros = vec![0; ImageProcessor::MAX_ENCODED_BYTES + (1 << 20)];
        let mut bomb = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
        bomb.write_all(&zeros).unwrap();
        let bomb = bomb.finish().unwrap();
        let head = format!("HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: {}\r\n\r\n", bomb.len());
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let host = listener.local_addr().unwrap().to_string();
        let server = std::thread::spawn(move || {
            let mut request = vec![0; 4096];
            let (mut stream, _) = listener.accept().unwrap();
            let len = stream.read(&mut request).unwrap();
            let _ = stream.write_all(&[head.as_bytes(), &bomb].concat());
            String::from_utf8_lossy(&request[..len]).to_ascii_lowercase()
        });
        assert!(fetch_from(&host).unwrap_err().contains(&format!("{} bytes", ImageProcessor::MAX_ENCODED_BYTES + 1)));
        assert!(server.join().unwrap().contains("accept-encoding: identity"));
    }

    /// The URL of an image on a host that sends the start of the image and then waits, and the allowed hosts. Sends `true`
    /// for each request and `false` for each connection that the client closes.
    fn slow_image() -> (String, Arc<ImageUrls>, tokio::sync::mpsc::UnboundedReceiver<bool>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let host = listener.local_addr().unwrap().to_string();
        let (events, received) = tokio::sync::mpsc::unbounded_channel();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                let events = events.clone();
                std::thread::spawn(move || {
                    let _ = stream.read(&mut [0; 4096]);
                    let head = b"HTTP/1.1 200 OK\r\nContent-Length: 20000000\r\n\r\n";
                    let _ = stream.write_all(&[&head[..], &vec![0; 1 << 20]].concat());
                    let _ = events.send(true);
                    while stream.read(&mut [0; 4096]).is_ok_and(|len| len > 0) {}
                    let _ = events.send(false);
                });
            }
        });
        (format!("http://{host}/"), Arc::new(ImageUrls::new(&[host])), received)
    }

    fn request_memory() -> Arc<RequestMemory> {
        let memory = RequestMemory::new(&Metrics::new("0", "cpu"));
        memory.set_plan(1 << 30);
        memory
    }

    /// A download by its own request.
    fn spawn_download(urls: &Arc<ImageUrls>, url: &str, memory: &Arc<RequestMemory>) -> JoinHandle<()> {
        let mut downloads = ImageDownloads::new(urls.clone());
        let url = url.to_owned();
        let permit = memory.permit();
        tokio::spawn(async move {
            let _ = downloads.fetch(url, true, &permit).await;
        })
    }

    #[tokio::test]
    async fn dropped_download_ends_and_frees_its_memory() {
        let (url, urls, mut events) = slow_image();
        let memory = request_memory();
        for _ in 0..3 {
            let started = Instant::now();
            let client = spawn_download(&urls, &url, &memory);
            assert_eq!(events.recv().await, Some(true), "the download has begun");
            assert_eq!(memory.used(), ImageProcessor::MAX_ENCODED_BYTES);
            client.abort();
            assert_eq!(events.recv().await, Some(false), "the connection is closed");
            while memory.used() > 0 || urls.places.available_permits() < PLACES {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            assert!(started.elapsed() < TIMEOUT, "the download ended by itself");
        }
    }

    #[tokio::test]
    async fn four_downloads_run_at_the_same_time() {
        let (url, urls, mut events) = slow_image();
        let memory = request_memory();
        let mut clients: Vec<_> = (0..30).map(|_| spawn_download(&urls, &url, &memory)).collect();
        for _ in 0..PLACES {
            assert_eq!(events.recv().await, Some(true));
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
        assert!(events.try_recv().is_err(), "a fifth download");
        assert_eq!(memory.used(), PLACES * ImageProcessor::MAX_ENCODED_BYTES, "waiting downloads need no memory");
        // Clients that leave while they wait take no place.
        let last = clients.pop().unwrap();
        clients.iter().for_each(JoinHandle::abort);
        let mut began = 0;
        for _ in 0..=PLACES {
            began += usize::from(events.recv().await == Some(true));
        }
        assert_eq!(began, 1, "the last client's download");
        last.abort();
    }

    #[tokio::test]
    async fn images_of_a_request_share_one_deadline() {
        let (url, urls, _events) = slow_image();
        let memory = request_memory();
        let permit = memory.permit();
        let mut downloads = ImageDownloads::new(urls.clone());
        downloads.deadline = Some(Instant::now() + Duration::from_millis(300));
        for _ in 0..3 {
            assert!(downloads.fetch(url.clone(), true, &permit).await.unwrap().is_err());
        }
        while memory.used() > 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        // A request that finds no place until its deadline may try again.
        let _places = urls.places.clone().acquire_many_owned(PLACES as u32).await.unwrap();
        for wait in [20, 200, 2000, 20_000] {
            let mut downloads = ImageDownloads::new(urls.clone());
            downloads.deadline = Some(Instant::now() + Duration::from_millis(wait));
            match downloads.fetch(url.clone(), true, &permit).await {
                Err(refused) => return assert_eq!(refused.status, 503),
                // A busy machine stopped this thread until the deadline. The next one is later.
                Ok(fetched) => assert!(fetched.is_err()),
            }
        }
        panic!("every deadline has passed");
    }

    #[tokio::test]
    async fn earlier_images_leave_time_for_new_images() {
        let (url, urls, mut events) = slow_image();
        let memory = request_memory();
        let permit = memory.permit();
        let mut downloads = ImageDownloads::new(urls);
        downloads.earlier_time = Duration::from_millis(300);
        for _ in 0..3 {
            assert!(downloads.fetch(url.clone(), false, &permit).await.unwrap().is_err());
        }
        assert!(downloads.earlier_time < Duration::from_millis(100), "{:?}", downloads.earlier_time);
        assert!(downloads.deadline.unwrap() > Instant::now(), "a new image has time");
        while events.try_recv().is_ok() {}
        let new = tokio::spawn(async move { downloads.fetch(url, true, &permit).await.map(drop) });
        let began = async { while events.recv().await != Some(true) {} };
        timeout_at(Instant::now() + Duration::from_secs(20), began).await.expect("the new image is downloaded");
        new.abort();
    }

    #[test]
    fn private_addresses_are_not_public() {
        let private = "127.0.0.1 10.1.2.3 172.16.0.1 192.168.1.1 169.254.169.254 100.64.0.1 0.0.0.0 255.255.255.255 \
            224.0.0.1 ::1 :: fe80::1 fc00::1 ::ffff:127.0.0.1 2002:7f00:1:: 64:ff9b::7f00:1";
        for (addresses, public) in [("8.8.8.8 2606:4700::1 ::ffff:8.8.8.8", true), (private, false)] {
            for address in addresses.split(' ') {
                let ip: IpAddr = address.parse().unwrap();
                assert_eq!(is_public(&SocketAddr::new(ip, 80)), public, "{address}");
            }
        }
    }
}

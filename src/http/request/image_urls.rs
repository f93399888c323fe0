//! Downloads images from `http` and `https` URLs. Only hosts that the operator lists are allowed, so that a request
//! cannot make the server read from its own network.

use crate::engine::ImageProcessor;
use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    time::Duration,
};
use ureq::{
    Agent,
    config::Config,
    http::Uri,
    unversioned::{
        resolver::{DefaultResolver, ResolvedSocketAddrs, Resolver},
        transport::{DefaultConnector, NextTimeout},
    },
};

/// Maximum time to fetch an image.
const TIMEOUT: Duration = Duration::from_secs(20);

/// The hosts that images may be fetched from. By default, no host is allowed.
#[derive(Debug, Default)]
pub struct ImageUrls {
    /// Each entry is `host` for the scheme's default port, or `host:port`, in lower case.
    hosts: Vec<String>,
}

impl ImageUrls {
    pub fn new(hosts: &[String]) -> Self {
        Self { hosts: hosts.iter().map(|host| host.trim().to_ascii_lowercase()).collect() }
    }

    /// Maximum number of bytes that [`ImageUrls::fetch`] returns.
    pub fn max_bytes(&self) -> usize {
        if self.hosts.is_empty() { 0 } else { ImageProcessor::MAX_ENCODED_BYTES }
    }

    /// Downloads an image. Blocks. Follows no redirects.
    ///
    /// # Errors
    /// Returns the reason why the image is not shown. The text completes "the image ...".
    pub fn fetch(&self, url: &str) -> Result<Vec<u8>, String> {
        let uri: Uri = url.parse().map_err(|_| "has an invalid URL".to_owned())?;
        let host = self.allowed_host(&uri)?;
        let config = Agent::config_builder()
            .max_redirects(0)
            .max_redirects_will_error(false)
            .timeout_global(Some(TIMEOUT))
            .proxy(None)
            .user_agent("moestro")
            .build();
        let resolver = PublicResolver { allows_private: is_address_or_local(&host) };
        let agent = Agent::with_parts(config, DefaultConnector::default(), resolver);
        let failed = |error: ureq::Error| {
            tracing::info!(host, %error, "cannot fetch an image");
            "cannot be fetched from its URL".to_owned()
        };
        let mut response = agent.get(uri).call().map_err(failed)?;
        if !response.status().is_success() {
            return Err(format!("cannot be fetched from its URL: status {}", response.status().as_u16()));
        }
        response.body_mut().with_config().limit(ImageProcessor::MAX_ENCODED_BYTES as u64).read_to_vec().map_err(failed)
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
    fn resolve(&self, uri: &Uri, config: &Config, timeout: NextTimeout) -> Result<ResolvedSocketAddrs, ureq::Error> {
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
    use std::{
        io::{Read, Write},
        net::TcpListener,
    };

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

    #[test]
    fn fetch_follows_no_redirect() {
        let fetch = |response: Vec<u8>| {
            let host = format!("127.0.0.1:{}", answer_once(response));
            ImageUrls::new(std::slice::from_ref(&host)).fetch(&format!("http://{host}/a.png"))
        };
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
    fn names_with_private_addresses_are_refused() {
        let port = answer_once(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nsecret".to_vec());
        // Every name under `.localhost` resolves to this machine. Only `localhost` itself may have a private address.
        let host = format!("images.localhost:{port}");
        assert!(ImageUrls::new(std::slice::from_ref(&host)).fetch(&format!("http://{host}/")).is_err());
    }

    #[test]
    fn private_addresses_are_not_public() {
        for (address, public) in [
            ("8.8.8.8", true),
            ("127.0.0.1", false),
            ("10.1.2.3", false),
            ("172.16.0.1", false),
            ("192.168.1.1", false),
            ("169.254.169.254", false),
            ("100.64.0.1", false),
            ("0.0.0.0", false),
            ("255.255.255.255", false),
            ("224.0.0.1", false),
            ("2606:4700::1", true),
            ("::1", false),
            ("::", false),
            ("fe80::1", false),
            ("fc00::1", false),
            ("::ffff:127.0.0.1", false),
            ("::ffff:8.8.8.8", true),
            ("2002:7f00:1::", false),
            ("64:ff9b::7f00:1", false),
        ] {
            let ip: IpAddr = address.parse().unwrap();
            assert_eq!(is_public(&SocketAddr::new(ip, 80)), public, "{address}");
        }
    }
}

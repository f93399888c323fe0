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
    let redirect = format!("HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:{target}/\r\nContent-Length: 0\r\n\r\n");
    assert!(fetch(redirect.into_bytes()).unwrap_err().contains("302"));
    for status in [403, 404, 503] {
        let refused = format!("HTTP/1.1 {status} No\r\nContent-Length: 0\r\n\r\n");
        assert!(fetch(refused.into_bytes()).unwrap_err().ends_with(&format!(": status {status}")), "{status}");
    }
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

/// Number of bytes that [`slow_image`] declares.
const SLOW_BYTES: usize = 20_000_000;

/// The URL of an image on a host that sends the start of the image and then waits, and the allowed hosts. Sends `true`
/// for each request and `false` for each connection that the client closes.
fn slow_image() -> (String, Arc<ImageUrls>, tokio::sync::mpsc::UnboundedReceiver<bool>) {
    let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {SLOW_BYTES}\r\n\r\n");
    slow_host([head.as_bytes(), &vec![0; 1 << 20]].concat())
}

/// The same for a host that sends `start`.
fn slow_host(start: Vec<u8>) -> (String, Arc<ImageUrls>, tokio::sync::mpsc::UnboundedReceiver<bool>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let host = listener.local_addr().unwrap().to_string();
    let (events, received) = tokio::sync::mpsc::unbounded_channel();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let events = events.clone();
            let start = start.clone();
            std::thread::spawn(move || {
                let _ = stream.read(&mut [0; 4096]);
                let _ = stream.write_all(&start);
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

async fn wait_for_memory(memory: &RequestMemory, bytes: usize) {
    while memory.used() != bytes {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// Memory of a server with a limit of 512 MiB. A large request may take 36 MiB.
fn small_memory() -> Arc<RequestMemory> {
    let memory = RequestMemory::new(&Metrics::new("0", "cpu"));
    memory.set_plan(64 << 20);
    memory
}

#[tokio::test]
async fn slow_hosts_lock_out_no_other_image() {
    let memory = small_memory();
    let mut slow = Vec::new();
    let chunked = [&b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n100\r\n"[..], &[0; 256]].concat();
    for (start, bytes) in [(Vec::new(), 0), (b"HTTP/1.1 200 OK\r\n".to_vec(), 0), (chunked, PIECE + 1)] {
        let (url, urls, mut events) = slow_host(start);
        slow.push(spawn_download(&urls, &url, &memory));
        assert_eq!(events.recv().await, Some(true));
        wait_for_memory(&memory, bytes).await;
    }
    let image = vec![7; 15 << 20];
    let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", image.len());
    let host = format!("127.0.0.1:{}", answer_once([head.as_bytes(), &image].concat()));
    let mut downloads = ImageDownloads::new(Arc::new(ImageUrls::new(std::slice::from_ref(&host))));
    let fetched = downloads.fetch(format!("http://{host}/"), true, &memory.permit()).await.unwrap();
    let (found, own) = fetched.unwrap();
    assert!(found == image);
    assert_eq!(own.bytes(), image.len());
    slow.iter().for_each(JoinHandle::abort);
}

#[tokio::test]
async fn download_waits_for_memory_until_its_deadline() {
    let memory = small_memory();
    let held = memory.permit().reserve(36 << 20).unwrap();
    let (url, urls, mut events) = slow_image();
    // On a busy machine, the time may end before the host has answered.
    for wait in [500, 5000, 20_000] {
        let mut downloads = ImageDownloads::new(urls.clone());
        downloads.time = Duration::from_millis(wait);
        let fetched = downloads.fetch(url.clone(), true, &memory.permit()).await;
        if fetched.is_err() || wait == 20_000 {
            assert_eq!(fetched.map(drop).unwrap_err().status, 503);
            break;
        }
    }
    let mut downloads = ImageDownloads::new(urls.clone());
    downloads.earlier_time = Duration::from_millis(500);
    assert!(downloads.fetch(url.clone(), false, &memory.permit()).await.unwrap().is_err());
    while events.try_recv().is_ok() {}
    let waiting = spawn_download(&urls, &url, &memory);
    while events.recv().await != Some(true) {}
    drop(held);
    wait_for_memory(&memory, SLOW_BYTES + 1).await;
    waiting.abort();
}

#[tokio::test]
async fn dropped_download_ends_and_frees_its_memory() {
    let (url, urls, mut events) = slow_image();
    let memory = request_memory();
    for _ in 0..3 {
        let started = Instant::now();
        let client = spawn_download(&urls, &url, &memory);
        assert_eq!(events.recv().await, Some(true), "the download has begun");
        wait_for_memory(&memory, SLOW_BYTES + 1).await;
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
    // Waiting downloads need no memory.
    wait_for_memory(&memory, PLACES * (SLOW_BYTES + 1)).await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert!(events.try_recv().is_err(), "a fifth download");
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
    downloads.time = Duration::from_millis(300);
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
        downloads.time = Duration::from_millis(wait);
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
    assert!(!downloads.time.is_zero(), "a new image has time");
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

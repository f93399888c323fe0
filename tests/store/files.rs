//! Tests of functions that read, replace and reject files.

use moestro_base::platform::{
    Access, DataFile, MAX_BLOCK,
    atomic_file::{PartialDir, TempFile, private_dir, replace_file},
    check_small_file, read_aligned, read_small_file, sha256_file, zeroed_buffer,
};
use std::{
    fs::{self, File},
    io::{self, Write},
    os::unix::{fs::PermissionsExt, net::UnixListener},
    path::Path,
    time::{Duration, Instant},
};
use test_support::fifo::make_fifo;

fn file_of(len: usize) -> (tempfile::NamedTempFile, Vec<u8>) {
    let bytes: Vec<u8> = (0..len).map(|i| (i * 31 + i / 251) as u8).collect();
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(&bytes).unwrap();
    file.as_file().sync_all().unwrap();
    (file, bytes)
}

#[test]
fn direct_and_buffered_reads_return_same_bytes() {
    let (named, bytes) = file_of(3 * MAX_BLOCK + 100);
    for access in [Access::Direct, Access::Buffered] {
        let opened = match DataFile::open(named.path(), access) {
            Err(error) if error.kind() == io::ErrorKind::Unsupported => continue,
            other => other.unwrap(),
        };
        let mut map = memmap2::MmapMut::map_anon(4 * MAX_BLOCK).unwrap();
        let buffer = &mut map[..];
        let got = opened.read_at(buffer, MAX_BLOCK as u64).unwrap();
        assert_eq!(&buffer[..got], &bytes[MAX_BLOCK..], "{access:?}: up to the end of the file");
        assert_eq!(opened.len(), bytes.len() as u64);
    }
}

#[test]
fn dropped_pages_leave_the_cache() {
    // The file is in the build directory, because the directory for temporary files may be in memory.
    let mut named = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let len = 64 * 16384;
    // The file is written in small parts. A large write could become one large block of the page cache, which can only
    // be dropped as a whole.
    (0..len / 4096).for_each(|_| named.write_all(&[7; 4096]).unwrap());
    named.as_file().sync_all().unwrap();
    let opened = DataFile::open(named.path(), Access::Buffered).unwrap();
    let cached = || {
        // SAFETY: the file is not modified while it is mapped.
        let map = unsafe { memmap2::Mmap::map(named.as_file()).unwrap() };
        let mut pages = vec![0; len / 4096];
        // SAFETY: the range is mapped, and `pages` has a byte for each page of at least 4096 bytes.
        assert_eq!(unsafe { libc::mincore(map.as_ptr().cast_mut().cast(), len, pages.as_mut_ptr().cast()) }, 0);
        pages.iter().filter(|page: &&u8| **page & 1 == 1).count()
    };
    opened.read_at(&mut vec![0; len], 0).unwrap();
    assert!(cached() > 0);
    opened.drop_cached(5000, len - 5000);
    assert!(cached() <= 4, "{} pages", cached());
}

#[test]
fn check_unchanged_detects_writes_not_renames() {
    let (named, _) = file_of(1000);
    let opened = DataFile::open(named.path(), Access::Buffered).unwrap();
    opened.check_unchanged().unwrap();
    let (other, _) = file_of(500);
    let path = named.path().to_owned();
    fs::rename(other.path(), &path).unwrap();
    opened.check_unchanged().unwrap();

    let again = DataFile::open(&path, Access::Buffered).unwrap();
    fs::OpenOptions::new().append(true).open(&path).unwrap().write_all(b"x").unwrap();
    assert!(again.check_unchanged().is_err());
}

#[test]
fn directory_is_not_a_data_file() {
    assert!(DataFile::open(Path::new("/"), Access::Buffered).is_err());
}

#[test]
fn fifos_devices_and_huge_files_are_rejected() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    make_fifo(&at("pipe"));
    let _listener = UnixListener::bind(at("socket")).unwrap();
    let begin = Instant::now();
    for path in [at("pipe"), at("socket"), "/dev/zero".into(), "/dev/null".into(), "/".into()] {
        assert!(read_small_file(&path, 1 << 20).is_err(), "{}", path.display());
        assert!(check_small_file(&path, 1 << 20).is_err(), "{}", path.display());
    }
    let large = File::create(at("large")).unwrap();
    large.set_len(1 << 40).unwrap();
    let error = read_small_file(&at("large"), 100).unwrap_err().to_string();
    assert!(error.contains("1099511627776 bytes"), "{error}");
    assert!(begin.elapsed() < Duration::from_secs(60));
    fs::write(at("small"), [1; 100]).unwrap();
    assert_eq!(read_small_file(&at("small"), 100).unwrap(), [1; 100]);
    assert!(read_small_file(&at("small"), 99).is_err() && check_small_file(&at("small"), 99).is_err());
    check_small_file(&at("small"), 100).unwrap();
    check_small_file(&at("none"), 0).unwrap();
    assert_eq!(read_small_file(&at("none"), 1).unwrap_err().kind(), io::ErrorKind::NotFound);
}

#[test]
fn file_hash_is_lower_case_sha256() {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(b"abc").unwrap();
    let expected = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
    assert_eq!(sha256_file(file.path()).unwrap(), expected);
}

#[test]
fn private_dir_rejects_foreign_directories() {
    let root = tempfile::tempdir().unwrap();
    let dir = private_dir(root.path()).unwrap();
    assert_eq!(private_dir(root.path()).unwrap(), dir, "the directory is reused");
    fs::set_permissions(&dir, fs::Permissions::from_mode(0o777)).unwrap();
    assert!(private_dir(root.path()).is_err());
    fs::remove_dir(&dir).unwrap();
    std::os::unix::fs::symlink("/tmp", &dir).unwrap();
    assert!(private_dir(root.path()).is_err());
}

#[test]
fn replace_file_is_all_or_nothing() {
    let root = tempfile::tempdir().unwrap();
    let file = root.path().join("a/file");
    replace_file(&file, b"one").unwrap();
    replace_file(&file, b"two").unwrap();
    assert_eq!(fs::read(&file).unwrap(), b"two");
    // A file cannot replace a directory. After the error, no temporary file is left.
    assert!(replace_file(&root.path().join("a"), b"three").is_err());
    assert_eq!(fs::read_dir(root.path()).unwrap().count(), 1);
    assert_eq!(fs::read_dir(root.path().join("a")).unwrap().count(), 1);
}

#[test]
fn concurrent_temp_files_do_not_collide() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("file");
    let write = |parts: &[&[u8]]| TempFile::write(&path, 0o600, parts).unwrap();
    let (one, other) = (write(&[b"1", b"2"]), write(&[b"12"]));
    one.persist(&path).unwrap();
    other.persist(&path).unwrap();
    drop(write(&[b"3"]));
    assert_eq!((fs::read(&path).unwrap(), fs::read_dir(dir.path()).unwrap().count()), (b"12".to_vec(), 1));
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
}

#[test]
fn partial_dir_is_all_or_nothing() {
    let root = tempfile::tempdir().unwrap();
    let out = root.path().join("a/b");
    let partial = PartialDir::create(&out).unwrap();
    fs::write(partial.path().join("x"), "1").unwrap();
    assert!(PartialDir::create(&out).err().unwrap().to_string().contains("another run"));
    drop(partial);
    assert_eq!(fs::read_dir(root.path().join("a")).unwrap().count(), 0);
    // A killed process leaves its temporary directory without a lock.
    fs::create_dir(root.path().join("a/.b.partial")).unwrap();
    fs::write(root.path().join("a/.b.partial/old"), "0").unwrap();
    let partial = PartialDir::create(&out).unwrap();
    fs::write(partial.path().join("x"), "1").unwrap();
    partial.finish(&out).unwrap();
    let names: Vec<_> = fs::read_dir(&out).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names, ["x"]);
    assert_eq!(fs::read_dir(root.path().join("a")).unwrap().count(), 1);
}

#[test]
fn zeroed_buffer_is_zero_and_writable() {
    for len in [0, 1, 4096, (2 << 20) - 1, (9 << 20) + 5] {
        let mut bytes = zeroed_buffer(len);
        assert!(bytes.len() == len && bytes.iter().all(|byte| *byte == 0));
        bytes.fill(7);
        bytes.shrink_to_fit();
        assert!(bytes.iter().all(|byte| *byte == 7));
    }
}

#[test]
fn short_direct_reads_continue_at_block_boundaries() {
    const BLOCK: usize = 64;
    // This simulates direct reads: it rejects unaligned reads, and returns odd numbers of bytes.
    let file: Vec<u8> = (0..1000u32).map(|at| (at * 7 + at / 256) as u8).collect();
    for (needed, len) in [(1000, 1024), (500, 512), (64, 64)] {
        let mut buffer = vec![0; len];
        let mut reads = 0;
        let read = |into: &mut [u8], start: usize| {
            if !start.is_multiple_of(BLOCK) || !into.len().is_multiple_of(BLOCK) {
                return Err(io::Error::from_raw_os_error(libc::EINVAL));
            }
            reads += 1;
            if reads % 3 == 0 {
                return Err(io::ErrorKind::Interrupted.into());
            }
            let got = into.len().min(file.len() - start).min(101);
            into[..got].copy_from_slice(&file[start..start + got]);
            Ok(got)
        };
        read_aligned(&mut buffer, needed, BLOCK, read).unwrap();
        assert_eq!(buffer[..needed], file[..needed]);
    }
    let error = read_aligned(&mut [0; 64], 64, BLOCK, |_, _| Ok(30)).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
    assert!(error.to_string().contains("34 bytes are missing"), "{error}");
}

//! Transfers several files in parallel, and several pieces of a large file, because one connection to a hub is slow.
//!
//! ```text
//! Waiting ----> FirstPiece ----> Pieces -------> Done
//!   |  ^           |                              ^
//!   +--+           +-----------> WholeFile -------+
//!
//! Waiting      not opened yet; opened again later if another process downloads the file
//! FirstPiece   one request for a range, to find out whether the hub supports ranges
//! Pieces       the hub supports ranges: several pieces are requested in parallel
//! WholeFile    the hub ignores ranges: one connection transfers the whole file
//! Done         verified and linked into the snapshot
//! ```
//! Worker threads take pieces from a shared state. A worker holds the lock of the state while it takes a piece and
//! while it writes received bytes, but not while it reads from the network.

use super::{
    client::{MAX_ATTEMPTS, RequestError},
    download::{BlobState, MissingRanges, ModelDownload},
    interrupt::DownloadInterrupt,
    listing::RepoFile,
};
use moestro_base::{error::StoreError, platform::FileLock};
use parking_lot::{Condvar, Mutex};
use std::{
    fs::File,
    io::{self, Read},
    ops::Range,
    os::unix::fs::FileExt,
    sync::Arc,
    time::{Duration, Instant},
};

/// Maximum number of connections.
const MAX_CONNECTIONS: u64 = 12;
/// Interval at which the thread that saves looks for the end of the download.
const END_CHECK_INTERVAL: Duration = Duration::from_millis(50);
/// Delay before a file is opened again if another process downloads it.
const BUSY_DELAY: Duration = Duration::from_millis(300);

/// The progress of a download, in bytes.
#[derive(Debug, Clone, Copy)]
pub struct DownloadProgress {
    /// Includes the bytes of earlier runs.
    pub on_disk: u64,
    /// Received in this run.
    pub received: u64,
    pub total: u64,
}

/// Called after each change of the progress.
pub type OnProgress<'a> = &'a (dyn Fn(DownloadProgress) + Sync);

/// Downloads the missing bytes of these files, verifies the files and links them into the snapshot. `on_disk` of the
/// `total` bytes are in complete files. Ends early, with the progress saved, if `interrupt` requests it.
pub fn download_files(
    download: &ModelDownload<'_>,
    files: &[(&RepoFile, u64)],
    (on_disk, total): (u64, u64),
    on_progress: OnProgress<'_>,
    interrupt: &DownloadInterrupt,
) -> Result<(), StoreError> {
    let _running = interrupt.start()?;
    download.create_dirs()?;
    let pieces = files.iter().map(|(_, size)| size.div_ceil(download.piece_bytes).max(1));
    let workers = pieces.fold(0, u64::saturating_add).min(MAX_CONNECTIONS);
    let files = files.iter().map(|&(listed, size)| FileDownload::new(listed, size)).collect();
    let state = Mutex::new(DownloadState { files, pieces: 0, on_disk, received: 0, error: None });
    let transfer = Transfer { download, state, changed: Condvar::new(), total, on_progress, interrupt };
    std::thread::scope(|scope| {
        for number in 1..workers {
            let thread = std::thread::Builder::new().name(format!("pull-{number}"));
            // If a thread cannot be started, the other threads do its work. The calling thread also works.
            let _ = thread.spawn_scoped(scope, || transfer.work());
        }
        let saver = std::thread::Builder::new().name("pull-save".into());
        // Without this thread, the progress is saved only at the end.
        let _ = saver.spawn_scoped(scope, || transfer.save_until_end());
        transfer.work();
    });
    transfer.save();
    transfer.state.into_inner().error.map_or(Ok(()), Err)
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum FileStage {
    Waiting,
    FirstPiece,
    Pieces,
    WholeFile,
    Done,
}

/// The download of one file.
struct FileDownload<'a> {
    listed: &'a RepoFile,
    size: u64,
    stage: FileStage,
    etag: Option<String>,
    /// Missing ranges that no worker has taken.
    free: Vec<Range<u64>>,
    /// Id of each piece in transfer, and the part of its range that has not arrived.
    in_flight: Vec<(u64, Range<u64>)>,
    /// The open part file, and the lock that excludes other processes.
    part: Option<(Arc<File>, FileLock)>,
    not_before: Instant,
    /// Number of times that the download restarted because the file had changed on the hub.
    restarts: u32,
}

/// A piece of a file.
#[derive(Clone, Copy)]
struct FilePiece<'a> {
    file: usize,
    id: u64,
    listed: &'a RepoFile,
    /// Size of the whole file.
    size: u64,
}

/// The state that all workers share.
struct DownloadState<'a> {
    files: Vec<FileDownload<'a>>,
    /// Number of pieces that workers have taken. This is also the id of the last piece.
    pieces: u64,
    on_disk: u64,
    received: u64,
    error: Option<StoreError>,
}

impl DownloadState<'_> {
    fn is_over(&self) -> bool {
        self.error.is_some() || self.files.iter().all(|file| file.stage == FileStage::Done)
    }
}

struct Transfer<'a> {
    download: &'a ModelDownload<'a>,
    state: Mutex<DownloadState<'a>>,
    changed: Condvar,
    total: u64,
    on_progress: OnProgress<'a>,
    interrupt: &'a DownloadInterrupt,
}

/// The reason why a piece was not transferred.
enum PieceError {
    /// The download of the file has restarted, or another piece failed permanently.
    Cancelled,
    Request(RequestError),
    Disk(io::Error),
}

impl From<RequestError> for PieceError {
    fn from(error: RequestError) -> Self {
        PieceError::Request(error)
    }
}

impl<'a> FileDownload<'a> {
    fn new(listed: &'a RepoFile, size: u64) -> Self {
        let stage = FileStage::Waiting;
        let free = Vec::new();
        let in_flight = Vec::new();
        Self { listed, size, stage, etag: None, free, in_flight, part: None, not_before: Instant::now(), restarts: 0 }
    }

    fn start(&mut self, part: File, lock: FileLock, progress: MissingRanges) {
        self.free = progress.missing.iter().map(|&(from, to)| from..to).filter(|range| !range.is_empty()).collect();
        self.etag = progress.etag;
        self.part = Some((Arc::new(part), lock));
        self.stage = FileStage::FirstPiece;
    }

    fn missing(&self) -> impl Iterator<Item = &Range<u64>> {
        self.free.iter().chain(self.in_flight.iter().map(|piece| &piece.1))
    }

    fn on_disk(&self) -> u64 {
        self.size - self.missing().map(|range| range.end - range.start).sum::<u64>()
    }

    fn missing_ranges(&self) -> MissingRanges {
        let mut ranges: Vec<_> =
            self.missing().filter(|range| !range.is_empty()).map(|range| (range.start, range.end)).collect();
        ranges.sort_unstable();
        let mut missing: Vec<(u64, u64)> = Vec::with_capacity(ranges.len());
        for (from, to) in ranges {
            match missing.last_mut() {
                Some(last) if last.1 == from => last.1 = to,
                _ => missing.push((from, to)),
            }
        }
        MissingRanges { size: self.size, etag: self.etag.clone(), missing }
    }

    /// The next piece to transfer. An empty piece means that all bytes have arrived and the file has yet to be
    /// verified.
    fn next_piece(&mut self, max_bytes: u64) -> Option<Range<u64>> {
        if self.stage != FileStage::Pieces && !self.in_flight.is_empty() {
            return None;
        }
        let Some(first) = self.free.first_mut() else {
            return self.in_flight.is_empty().then_some(self.size..self.size);
        };
        let piece = first.start..first.end.min(first.start + max_bytes);
        first.start = piece.end;
        self.free.retain(|range| !range.is_empty());
        Some(piece)
    }
}

impl<'a> Transfer<'a> {
    /// The loop of one worker.
    fn work(&self) {
        while let Some(piece) = self.next() {
            let outcome = self.transfer(piece);
            self.finish(piece, outcome);
        }
    }

    /// Saves the progress in intervals, and once more if the download is interrupted.
    fn save_until_end(&self) {
        let mut saved = Instant::now();
        loop {
            let mut state = self.state.lock();
            if state.is_over() {
                return;
            }
            if self.interrupt.is_requested() {
                state.error = Some(StoreError::Other(format!(
                    "the download of {} was interrupted; its progress is saved",
                    self.download.id
                )));
                self.changed.notify_all();
                drop(state);
                self.save();
                return self.interrupt.confirm_saved();
            }
            if saved.elapsed() >= self.download.save_interval {
                drop(state);
                self.save();
                saved = Instant::now();
            } else {
                self.changed.wait_for(&mut state, END_CHECK_INTERVAL);
            }
        }
    }

    /// Saves the progress of all open files. Only one thread at a time may save.
    fn save(&self) {
        let open = |(index, file): (usize, &FileDownload<'a>)| {
            Some((index, file.listed, file.part.as_ref()?.0.clone(), file.missing_ranges()))
        };
        let files: Vec<_> = self.state.lock().files.iter().enumerate().filter_map(open).collect();
        for (index, listed, part, missing) in files {
            self.download.save_progress(listed, Some(&part), &missing);
            // If the file is done a moment later, `finish` removes the progress.
            if self.state.lock().files[index].stage == FileStage::Done {
                self.download.remove_progress(listed);
            }
        }
    }

    /// Waits for the next piece. Returns `None` if all files are done or a transfer has failed.
    fn next(&self) -> Option<FilePiece<'a>> {
        let mut guard = self.state.lock();
        loop {
            let state = &mut *guard;
            if state.is_over() {
                self.changed.notify_all();
                return None;
            }
            for (index, file) in state.files.iter_mut().enumerate() {
                if file.stage == FileStage::Done || Instant::now() < file.not_before {
                    continue;
                }
                if file.stage == FileStage::Waiting {
                    match self.download.open(file.listed, file.size) {
                        Ok(BlobState::Partial { part, lock, progress }) => file.start(part, lock, progress),
                        Ok(BlobState::Complete) => file.stage = FileStage::Done,
                        Ok(BlobState::Busy) => {
                            file.not_before = Instant::now() + BUSY_DELAY;
                            continue;
                        }
                        Err(error) => {
                            state.error = Some(StoreError::at(&self.download.blob(file.listed))(error));
                            break;
                        }
                    }
                    state.on_disk += file.on_disk();
                    self.report(state.on_disk, state.received);
                }
                if file.stage != FileStage::Done
                    && let Some(range) = file.next_piece(self.download.piece_bytes)
                {
                    state.pieces += 1;
                    file.in_flight.push((state.pieces, range));
                    return Some(FilePiece { file: index, id: state.pieces, listed: file.listed, size: file.size });
                }
            }
            if state.error.is_none() && state.files.iter().any(|file| file.stage != FileStage::Done) {
                self.changed.wait_for(&mut guard, BUSY_DELAY);
            }
        }
    }

    /// Reports progress. The caller must hold the lock, so that reported values are in order.
    fn report(&self, on_disk: u64, received: u64) {
        if self.total > 0 {
            (self.on_progress)(DownloadProgress { on_disk, received, total: self.total });
        }
    }

    /// The part of a piece's range that has not arrived.
    fn remaining(&self, piece: FilePiece<'_>) -> Result<Range<u64>, PieceError> {
        let state = self.state.lock();
        let found = state.files[piece.file].in_flight.iter().find(|(id, _)| *id == piece.id);
        found.filter(|_| state.error.is_none()).map(|(_, range)| range.clone()).ok_or(PieceError::Cancelled)
    }

    /// Transfers a piece. Retries after broken connections, but fails after [`MAX_ATTEMPTS`] attempts in a row without
    /// progress.
    fn transfer(&self, piece: FilePiece<'_>) -> Result<(), PieceError> {
        let mut delay = self.download.retry_delay;
        let mut attempts = MAX_ATTEMPTS;
        loop {
            let before = self.remaining(piece)?;
            if before.is_empty() {
                return Ok(());
            }
            let error = match self.request(piece, before.clone()) {
                Err(PieceError::Request(error)) => error,
                other => return other,
            };
            attempts = if self.remaining(piece)? != before { MAX_ATTEMPTS } else { attempts - 1 };
            if attempts == 0 || !error.is_temporary() {
                return Err(error.into());
            }
            tracing::info!(file = piece.listed.name, %error, "download interrupted; retrying");
            std::thread::sleep(delay);
            delay = (delay * 2).min(30 * self.download.retry_delay);
        }
    }

    /// Sends one request and writes the received bytes.
    fn request(&self, piece: FilePiece<'_>, range: Range<u64>) -> Result<(), PieceError> {
        let url = self.download.url(piece.listed);
        let size = piece.size;
        let mut response = self.download.client.range(&url, range.start, range.end - 1)?;
        if let Some(found) = response.size.filter(|found| *found != size) {
            return Err(RequestError::Invalid(format!("{found} bytes, but its listing says {size}")).into());
        }
        self.accept(piece, &response.etag, response.is_range)?;
        let mut block = vec![0; 1 << 18];
        loop {
            let range = self.remaining(piece)?;
            let max = block.len().min(usize::try_from(range.end - range.start).unwrap_or(usize::MAX));
            if max == 0 {
                // A body without a length may have more bytes.
                let is_open = !response.is_range && response.size.is_none();
                return match is_open.then(|| response.body.read(&mut [0])) {
                    Some(Ok(more)) if more > 0 => {
                        Err(RequestError::Invalid(format!("more than the {size} bytes of its listing")).into())
                    }
                    _ => Ok(()),
                };
            }
            let got = match response.body.read(&mut block[..max]) {
                Ok(0) => {
                    let why = format!("the connection closed at byte {} of {size}", range.start);
                    return Err(RequestError::Connection(why).into());
                }
                Ok(got) => got,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(RequestError::Connection(error.to_string()).into()),
            };
            self.write(piece, &block[..got])?;
        }
    }

    /// Checks the headers of a response. Sets the stage to `Pieces` or `WholeFile`, depending on whether the hub
    /// supports ranges. If the file has changed on the hub, restarts the download of the file.
    fn accept(&self, piece: FilePiece<'_>, etag: &Option<String>, is_range: bool) -> Result<(), PieceError> {
        let state = &mut *self.state.lock();
        let file = &mut state.files[piece.file];
        if !file.in_flight.iter().any(|(id, _)| *id == piece.id) {
            return Err(PieceError::Cancelled);
        }
        let has_changed = file.listed.sha256().is_none() && file.etag.is_some() && file.etag != *etag;
        if has_changed {
            file.restarts += 1;
            if file.restarts >= MAX_ATTEMPTS {
                return Err(RequestError::Invalid("a different file in each response".into()).into());
            }
            tracing::info!(file = file.listed.name, "the file changed on the hub; restarting its download");
            state.on_disk -= file.on_disk();
            file.in_flight = Vec::new();
            file.etag = None;
            file.stage = FileStage::FirstPiece;
            file.free.clear();
            file.free.push(0..file.size);
            self.changed.notify_all();
            return Err(PieceError::Cancelled);
        }
        if file.listed.sha256().is_none() {
            file.etag.clone_from(etag);
        }
        if is_range {
            if file.stage == FileStage::FirstPiece {
                file.stage = FileStage::Pieces;
                self.changed.notify_all();
            }
            return Ok(());
        }
        if file.stage == FileStage::Pieces {
            return Err(RequestError::Connection("the hub sent the whole file instead of a range".into()).into());
        }
        state.on_disk -= file.on_disk();
        (file.free, file.in_flight, file.stage) = (Vec::new(), vec![(piece.id, 0..file.size)], FileStage::WholeFile);
        Ok(())
    }

    /// Writes received bytes to the part file. Holds the lock, so that no bytes of the old version are written after a
    /// restart.
    fn write(&self, piece: FilePiece<'_>, bytes: &[u8]) -> Result<(), PieceError> {
        let state = &mut *self.state.lock();
        let file = &mut state.files[piece.file];
        let in_flight = file.in_flight.iter_mut().find(|(id, _)| *id == piece.id);
        let (Some((_, range)), Some((part, _))) = (in_flight, &file.part) else { return Err(PieceError::Cancelled) };
        part.write_all_at(bytes, range.start).map_err(PieceError::Disk)?;
        range.start += bytes.len() as u64;
        state.on_disk += bytes.len() as u64;
        state.received += bytes.len() as u64;
        self.report(state.on_disk, state.received);
        Ok(())
    }

    /// Removes a finished piece. After the last piece of a file, verifies the file. A failed piece stops the whole
    /// download.
    fn finish(&self, piece: FilePiece<'_>, outcome: Result<(), PieceError>) {
        let part = {
            let file = &mut self.state.lock().files[piece.file];
            let Some(at) = file.in_flight.iter().position(|(id, _)| *id == piece.id) else { return };
            if outcome.is_ok() && !(file.free.is_empty() && file.in_flight.len() == 1) {
                file.in_flight.swap_remove(at);
                return;
            }
            // Keep the last piece in `in_flight`, so that no other worker verifies the file at the same time.
            file.part.as_ref().map(|(part, _)| part.clone())
        };
        let download = self.download;
        let listed = piece.listed;
        let result = match (outcome, part) {
            (Ok(()), Some(part)) => download.finish(listed, &part),
            (Err(PieceError::Request(error)), _) => Err(download.client.describe(download.id, &listed.name, error)),
            (Err(PieceError::Disk(error)), _) => Err(StoreError::at(&download.part(listed))(error)),
            (Ok(()), None) | (Err(PieceError::Cancelled), _) => return,
        };
        let state = &mut *self.state.lock();
        let file = &mut state.files[piece.file];
        match result {
            Ok(()) => {
                file.stage = FileStage::Done;
                file.part = None;
                file.in_flight.clear();
                // `save` may have written the progress while the file was verified.
                download.remove_progress(listed);
            }
            Err(error) => {
                state.error.get_or_insert(error);
            }
        }
        self.changed.notify_all();
    }
}

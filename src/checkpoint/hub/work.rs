//! Files brought several at once, and pieces of large ones at once, as one connection to a hub is slow.
//!
//! ```text
//!             the hub knows no ranges: one connection brings all of it
//!           +--------------------------------------------------------> Whole --+
//! Waiting --+                                                                  +--> checked, named, linked: Done
//!   |       +--> Asked: one piece, to see --> Ranges: more pieces at once -----+
//!   +--> another run is at it: later
//! ```
//! Workers take piece after piece from a desk that all share. Its lock is held for a look, and while bytes are written.

use super::{
    ATTEMPTS,
    client::Failure,
    download::{Download, Map, Opened},
    listing::Listed,
};
use crate::error::StoreError;
use parking_lot::{Condvar, Mutex};
use std::{
    fs::File,
    io::{self, Read},
    ops::Range,
    os::unix::fs::FileExt,
    sync::Arc,
    time::{Duration, Instant},
};

/// Connections at a time.
const CONNECTIONS: u64 = 12;
/// Between two writes of a file's map.
const SAVE: Duration = Duration::from_secs(5);
/// Before a file is looked at again that another run downloads.
const BUSY: Duration = Duration::from_millis(300);

/// Hears of bytes that are here, and of bytes in all.
pub type Progress<'a> = &'a (dyn Fn(u64, u64) + Sync);

/// Downloads these files, or what is missing of them, checks them and links them into the snapshot. `here` bytes of `total`
/// are there already.
pub fn fetch(
    download: &Download<'_>,
    files: &[(&Listed, u64)],
    here: u64,
    total: u64,
    progress: Progress<'_>,
) -> Result<(), StoreError> {
    download.prepare()?;
    let pieces = files.iter().map(|(_, size)| size.div_ceil(download.hub.piece).max(1));
    let workers = pieces.fold(0, u64::saturating_add).min(CONNECTIONS);
    let files = files.iter().map(|&(listed, size)| Way::new(listed, size)).collect();
    let desk = Mutex::new(Desk { files, jobs: 0, here, error: None });
    let work = Work { download, desk, changed: Condvar::new(), total, progress };
    std::thread::scope(|scope| {
        for number in 1..workers {
            let thread = std::thread::Builder::new().name(format!("pull-{number}"));
            // This thread works, too: one that cannot be had is no reason to give up.
            let _ = thread.spawn_scoped(scope, || work.go());
        }
        work.go();
    });
    let Desk { files, error, .. } = work.desk.into_inner();
    for way in &files {
        if let Some((part, _)) = &way.part {
            download.save(way.listed, Some(part), &way.map());
        }
    }
    error.map_or(Ok(()), Err)
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    Waiting,
    Asked,
    Ranges,
    Whole,
    Done,
}

/// One file.
struct Way<'a> {
    listed: &'a Listed,
    size: u64,
    stage: Stage,
    tag: Option<String>,
    /// Ranges that nobody brings yet, and those that a job brings, by its number, less the bytes that have come.
    free: Vec<Range<u64>>,
    flying: Vec<(u64, Range<u64>)>,
    /// Open, with the lock that keeps other runs away.
    part: Option<(Arc<File>, File)>,
    /// Nothing is done before.
    later: Instant,
    saved: Instant,
    /// Times that it was begun anew because it had changed.
    restarts: u32,
}

/// One piece of one file.
#[derive(Clone, Copy)]
struct Job {
    file: usize,
    id: u64,
}

/// The state that all workers share.
struct Desk<'a> {
    files: Vec<Way<'a>>,
    jobs: u64,
    here: u64,
    error: Option<StoreError>,
}

struct Work<'a> {
    download: &'a Download<'a>,
    desk: Mutex<Desk<'a>>,
    changed: Condvar,
    total: u64,
    progress: Progress<'a>,
}

/// The reason for which a piece is not there.
enum Stopped {
    /// The file was begun anew, or another piece has failed for good.
    Off,
    Failed(Failure),
}

impl From<Failure> for Stopped {
    fn from(failure: Failure) -> Self {
        Stopped::Failed(failure)
    }
}

impl<'a> Way<'a> {
    fn new(listed: &'a Listed, size: u64) -> Self {
        let (now, stage) = (Instant::now(), Stage::Waiting);
        let (free, flying) = (Vec::new(), Vec::new());
        Self { listed, size, stage, tag: None, free, flying, part: None, later: now, saved: now, restarts: 0 }
    }

    fn begin(&mut self, part: File, lock: File, map: Map) {
        self.free = map.missing.iter().map(|&(from, to)| from..to).filter(|range| !range.is_empty()).collect();
        self.tag = map.tag;
        self.part = Some((Arc::new(part), lock));
        self.stage = Stage::Asked;
    }

    fn missing(&self) -> u64 {
        self.free.iter().chain(self.flying.iter().map(|job| &job.1)).map(|range| range.end - range.start).sum()
    }

    fn map(&self) -> Map {
        let ranges = self.free.iter().chain(self.flying.iter().map(|job| &job.1));
        let mut ranges: Vec<_> =
            ranges.filter(|range| !range.is_empty()).map(|range| (range.start, range.end)).collect();
        ranges.sort_unstable();
        let mut missing: Vec<(u64, u64)> = Vec::with_capacity(ranges.len());
        for (from, to) in ranges {
            match missing.last_mut() {
                Some(last) if last.1 == from => last.1 = to,
                _ => missing.push((from, to)),
            }
        }
        Map { size: self.size, tag: self.tag.clone(), missing }
    }

    /// The next piece that somebody may bring: an empty one if all is there and only has to be checked.
    fn next(&mut self, most: u64) -> Option<Range<u64>> {
        if self.stage != Stage::Ranges && !self.flying.is_empty() {
            return None;
        }
        let Some(first) = self.free.first_mut() else {
            return self.flying.is_empty().then_some(self.size..self.size);
        };
        let piece = first.start..first.end.min(first.start + most);
        first.start = piece.end;
        self.free.retain(|range| !range.is_empty());
        Some(piece)
    }
}

impl<'a> Work<'a> {
    /// The life of one worker.
    fn go(&self) {
        while let Some(job) = self.next() {
            let outcome = self.bring(job);
            self.end(job, outcome);
        }
    }

    /// The next piece; waits while there is none, and `None` when there will be none.
    fn next(&self) -> Option<Job> {
        let mut guard = self.desk.lock();
        loop {
            let desk = &mut *guard;
            if desk.error.is_some() || desk.files.iter().all(|way| way.stage == Stage::Done) {
                self.changed.notify_all();
                return None;
            }
            for (file, way) in desk.files.iter_mut().enumerate() {
                if way.stage == Stage::Done || Instant::now() < way.later {
                    continue;
                }
                if way.stage == Stage::Waiting {
                    match self.download.open(way.listed, way.size) {
                        Ok(Opened::Part { part, lock, map }) => way.begin(part, lock, map),
                        Ok(Opened::Whole) => way.stage = Stage::Done,
                        Ok(Opened::Busy) => {
                            way.later = Instant::now() + BUSY;
                            continue;
                        }
                        Err(source) => {
                            desk.error = Some(StoreError::Io { path: self.download.blob(way.listed), source });
                            break;
                        }
                    }
                    desk.here += way.size - way.missing();
                    self.tell(desk.here);
                }
                if way.stage != Stage::Done
                    && let Some(piece) = way.next(self.download.hub.piece)
                {
                    desk.jobs += 1;
                    way.flying.push((desk.jobs, piece));
                    return Some(Job { file, id: desk.jobs });
                }
            }
            if desk.error.is_none() && desk.files.iter().any(|way| way.stage != Stage::Done) {
                self.changed.wait_for(&mut guard, BUSY);
            }
        }
    }

    /// Under the lock, so that what is told never goes back.
    fn tell(&self, here: u64) {
        if self.total > 0 {
            (self.progress)(here, self.total);
        }
    }

    /// The range that is missing of a piece; `Off` if nobody wants it any more.
    fn left(&self, job: Job) -> Result<Range<u64>, Stopped> {
        let desk = self.desk.lock();
        let flying = desk.files[job.file].flying.iter().find(|(id, _)| *id == job.id);
        flying.filter(|_| desk.error.is_none()).map(|(_, range)| range.clone()).ok_or(Stopped::Off)
    }

    /// Brings a piece, over broken connections as long as something arrives.
    fn bring(&self, job: Job) -> Result<(), Stopped> {
        let (mut wait, mut left) = (self.download.hub.wait, ATTEMPTS);
        loop {
            let before = self.left(job)?;
            if before.is_empty() {
                return Ok(());
            }
            let failure = match self.once(job, before.clone()) {
                Err(Stopped::Failed(failure)) => failure,
                other => return other,
            };
            left = if self.left(job)? != before { ATTEMPTS } else { left - 1 };
            if left == 0 || !failure.passes() {
                return Err(failure.into());
            }
            let file = self.desk.lock().files[job.file].listed;
            tracing::info!(file = file.name, error = %failure, "the download broke and goes on");
            std::thread::sleep(wait);
            wait = (wait * 2).min(30 * self.download.hub.wait);
        }
    }

    /// One request.
    fn once(&self, job: Job, range: Range<u64>) -> Result<(), Stopped> {
        let (listed, size) = {
            let desk = self.desk.lock();
            (desk.files[job.file].listed, desk.files[job.file].size)
        };
        let mut answer = self.download.client.part(&self.download.url(listed), range.start, Some(range.end - 1))?;
        if let Some(said) = answer.size.filter(|said| *said != size) {
            return Err(Failure::Nonsense(format!("{said} bytes where its listing says {size}")).into());
        }
        self.answered(job, &answer.tag, answer.ranged)?;
        let mut block = vec![0; 1 << 18];
        loop {
            let range = self.left(job)?;
            let most = block.len().min(usize::try_from(range.end - range.start).unwrap_or(usize::MAX));
            if most == 0 {
                return Ok(());
            }
            let got = match answer.body.read(&mut block[..most]) {
                Ok(0) => {
                    let why = format!("the connection ended at byte {} of {size}", range.start);
                    return Err(Failure::Broken(why).into());
                }
                Ok(got) => got,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(Failure::Broken(error.to_string()).into()),
            };
            self.came(job, &block[..got])?;
        }
    }

    /// An answer begins: it tells whether the hub knows ranges, and whether the file is the one it was.
    fn answered(&self, job: Job, tag: &Option<String>, ranged: bool) -> Result<(), Stopped> {
        let desk = &mut *self.desk.lock();
        let way = &mut desk.files[job.file];
        if !way.flying.iter().any(|(id, _)| *id == job.id) {
            return Err(Stopped::Off);
        }
        let other = way.listed.sha256().is_none() && way.tag.is_some() && way.tag != *tag;
        if other {
            way.restarts += 1;
            if way.restarts >= ATTEMPTS {
                return Err(Failure::Nonsense("another file each time it was asked".into()).into());
            }
            tracing::info!(file = way.listed.name, "it has changed at the hub and is begun anew");
            desk.here -= way.size - way.missing();
            (way.flying, way.tag, way.stage) = (Vec::new(), None, Stage::Asked);
            way.free.clear();
            way.free.push(0..way.size);
            self.changed.notify_all();
            return Err(Stopped::Off);
        }
        if way.listed.sha256().is_none() {
            way.tag.clone_from(tag);
        }
        if ranged {
            if way.stage == Stage::Asked {
                way.stage = Stage::Ranges;
                self.changed.notify_all();
            }
            return Ok(());
        }
        if way.stage == Stage::Ranges {
            return Err(Failure::Broken("the whole file came where a part was asked for".into()).into());
        }
        desk.here -= way.size - way.missing();
        (way.free, way.flying, way.stage) = (Vec::new(), vec![(job.id, 0..way.size)], Stage::Whole);
        Ok(())
    }

    /// Bytes go to their place. Under the lock: a file that is begun anew gets no old bytes.
    fn came(&self, job: Job, bytes: &[u8]) -> Result<(), Stopped> {
        let mut save = None;
        let mut guard = self.desk.lock();
        let desk = &mut *guard;
        let way = &mut desk.files[job.file];
        let flying = way.flying.iter_mut().find(|(id, _)| *id == job.id);
        let (Some((_, range)), Some((part, _))) = (flying, &way.part) else { return Err(Stopped::Off) };
        part.write_all_at(bytes, range.start).map_err(Failure::Disk)?;
        range.start += bytes.len() as u64;
        desk.here += bytes.len() as u64;
        if way.saved.elapsed() > SAVE {
            way.saved = Instant::now();
            save = Some((way.listed, part.clone(), way.map()));
        }
        self.tell(desk.here);
        drop(guard);
        if let Some((listed, part, map)) = save {
            self.download.save(listed, Some(&part), &map);
        }
        Ok(())
    }

    /// A piece is there, or will not come.
    fn end(&self, job: Job, outcome: Result<(), Stopped>) {
        let (listed, part) = {
            let way = &mut self.desk.lock().files[job.file];
            let Some(at) = way.flying.iter().position(|(id, _)| *id == job.id) else { return };
            if outcome.is_ok() && !(way.free.is_empty() && way.flying.len() == 1) {
                way.flying.swap_remove(at);
                return;
            }
            // The last one stays among those that fly, so that nobody else ends the file meanwhile.
            (way.listed, way.part.as_ref().map(|(part, _)| part.clone()))
        };
        let ended = match (outcome, part) {
            (Ok(()), Some(part)) => self.download.finish(listed, &part),
            (Err(Stopped::Failed(failure)), _) => Err(self.download.failed(listed, failure)),
            (Ok(()), None) | (Err(Stopped::Off), _) => return,
        };
        let desk = &mut *self.desk.lock();
        let way = &mut desk.files[job.file];
        match ended {
            Ok(()) => (way.stage, way.part, way.flying) = (Stage::Done, None, Vec::new()),
            Err(error) => {
                desk.error.get_or_insert(error);
            }
        }
        self.changed.notify_all();
    }
}

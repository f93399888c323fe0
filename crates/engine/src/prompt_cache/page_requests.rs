//! Requests of the disk cache's thread for the bytes of pages. Only the engine's thread uses the device that holds the
//! pages, so it reads them, between two passes. In the other direction, threads that read snapshot files fill pages: the
//! engine's thread waits for them, and lends them the model under a lock.

use moestro_model::model::{KvPage, Model};
use std::sync::{
    Weak,
    mpsc::{self, Receiver, SyncSender},
};

/// Returns the bytes of a page, or `None` if the page was freed or cannot be read.
pub type ReadPage<'a> = dyn FnMut(&Weak<KvPage>) -> Option<Vec<u8>> + 'a;

/// A page, which a sequence may free before it is read, and the channel for its bytes. If the page cannot be read, the
/// channel is dropped.
type PageRequest = (Weak<KvPage>, SyncSender<Vec<u8>>);

/// The requests that the engine's thread receives.
pub struct PageRequests(Receiver<PageRequest>);

/// Returns a [`ReadPage`] for the disk cache's thread, and the requests that it sends. It waits until the engine's
/// thread has read the page, so at most one page is on its way to the disk. `wake_engine` makes an idle engine call
/// [`PageRequests::answer_next`].
pub fn page_requests(
    wake_engine: impl Fn() + Send + 'static,
) -> (impl FnMut(&Weak<KvPage>) -> Option<Vec<u8>> + Send, PageRequests) {
    let (requests, received) = mpsc::channel();
    let read = move |page: &Weak<KvPage>| {
        let (sender, bytes) = mpsc::sync_channel(1);
        requests.send((page.clone(), sender)).ok()?;
        wake_engine();
        bytes.recv().ok()
    };
    (read, PageRequests(received))
}

impl PageRequests {
    /// Answers a request. Returns false if there is none. Never waits for a request.
    pub fn answer_next<M: Model>(&self, model: &mut M) -> bool {
        self.0.try_recv().map(|request| answer(request, model)).is_ok()
    }

    /// Answers requests until the disk cache's thread has ended.
    pub fn answer_all<M: Model>(&self, model: &mut M) {
        self.0.iter().for_each(|request| answer(request, model));
    }
}

fn answer<M: Model>((page, sender): PageRequest, model: &mut M) {
    if let Some(bytes) = read_page(&page, model) {
        // The receiver waits for the bytes.
        let _ = sender.send(bytes);
    }
}

/// A [`ReadPage`] for the engine's thread.
pub fn read_page<M: Model>(page: &Weak<KvPage>, model: &mut M) -> Option<Vec<u8>> {
    let page = page.upgrade()?;
    model.read_page(&page).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use mock_model::MockModel;
    use std::{
        sync::{
            Arc,
            atomic::{AtomicUsize, Ordering},
        },
        thread,
    };

    fn page(byte: u8) -> Arc<KvPage> {
        Arc::new(vec![byte; 4].into())
    }

    #[test]
    fn one_call_answers_one_request() {
        let asked = Arc::new(AtomicUsize::new(0));
        let counter = asked.clone();
        let (mut read, requests) = page_requests(move || _ = counter.fetch_add(1, Ordering::Relaxed));
        let mut model = MockModel::default();
        assert!(!requests.answer_next(&mut model), "there is no request");
        let pages = [page(1), page(2)];
        let weak = pages.each_ref().map(Arc::downgrade);
        let writer = thread::spawn(move || weak.map(|page| read(&page)));
        while asked.load(Ordering::Relaxed) < 1 {
            thread::yield_now();
        }
        assert!(requests.answer_next(&mut model));
        while asked.load(Ordering::Relaxed) < 2 {
            thread::yield_now();
        }
        assert!(!writer.is_finished(), "the second page was not read");
        requests.answer_next(&mut model);
        assert_eq!(writer.join().unwrap(), [Some(vec![1; 4]), Some(vec![2; 4])]);
    }

    #[test]
    fn freed_page_has_no_bytes() {
        let (mut read, requests) = page_requests(|| ());
        let page = page(1);
        let weak = Arc::downgrade(&page);
        let writer = thread::spawn(move || [read(&weak), read(&weak)]);
        answer(requests.0.recv().unwrap(), &mut MockModel::default());
        let second = requests.0.recv().unwrap();
        // The request does not keep the page.
        drop(page);
        answer(second, &mut MockModel::default());
        assert_eq!(writer.join().unwrap(), [Some(vec![1; 4]), None]);
    }

    #[test]
    fn stopped_engine_ends_the_wait() {
        let (mut read, requests) = page_requests(|| ());
        let page = page(1);
        let weak = Arc::downgrade(&page);
        let writer = thread::spawn(move || [read(&weak), read(&weak)]);
        drop(requests.0.recv().unwrap());
        drop(requests);
        assert_eq!(writer.join().unwrap(), [None, None]);
    }
}

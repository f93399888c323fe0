//! Responses that clients may come back to: in the requests' memory, and a part of it. Those that were not used for longest
//! go first.

use crate::http::{
    errors::ApiError,
    layers::memory::{self, MemoryPermit, RequestMemory},
};
use axum::body::Bytes;
use parking_lot::Mutex;
use serde_json::Value;
use std::{collections::VecDeque, sync::Arc};

/// The most responses that are kept.
const MOST: usize = 1000;

/// The most bytes that they may take together; never more than a quarter of the requests' memory.
const MOST_BYTES: usize = 64 << 20;

/// One response, with its input.
struct Kept {
    id: String,
    /// The response that it went on from.
    previous: Option<String>,
    input: Vec<Value>,
    output: Vec<Value>,
    /// All of it, as it is told.
    text: Bytes,
    bytes: usize,
}

/// The text of a response, which clients may still be reading when the response has made room for others.
struct Text {
    text: Vec<u8>,
    _permit: Option<MemoryPermit>,
}

impl AsRef<[u8]> for Text {
    fn as_ref(&self) -> &[u8] {
        &self.text
    }
}

#[derive(Default)]
struct Shelf {
    /// Least recently used first.
    kept: VecDeque<Kept>,
    bytes: usize,
}

pub struct Store {
    shelf: Mutex<Shelf>,
    most: usize,
    most_bytes: usize,
    budget: Option<Arc<RequestMemory>>,
}

impl Default for Store {
    fn default() -> Self {
        Self { shelf: Mutex::default(), most: MOST, most_bytes: MOST_BYTES, budget: None }
    }
}

impl Store {
    /// A store that takes its memory from `budget`.
    pub fn within(budget: Arc<RequestMemory>) -> Self {
        Self { budget: Some(budget), ..Self::default() }
    }

    /// Keeps a response, which went on from `previous` with `input`.
    pub fn keep(&self, previous: Option<String>, input: Vec<Value>, response: &Value) {
        let id = response["id"].as_str().unwrap_or_default().to_owned();
        let Ok(mut text) = serde_json::to_vec(response) else { return };
        text.shrink_to_fit();
        let output = response["output"].as_array();
        let bytes = text.capacity() + output.into_iter().chain([&input]).flatten().map(size).sum::<usize>();
        let most_bytes = self.budget.as_ref().map_or(usize::MAX, |budget| budget.total() / 4).min(self.most_bytes);
        let mut shelf = self.shelf.lock();
        while shelf.kept.len() >= self.most || shelf.bytes.saturating_add(bytes) > most_bytes {
            // Nothing is left to go: this one is too large.
            let Some(oldest) = shelf.kept.pop_front() else { return };
            shelf.bytes -= oldest.bytes;
        }
        let mut permit = self.budget.as_ref().map(RequestMemory::permit);
        if permit.as_mut().is_some_and(|permit| permit.resize(bytes).is_err()) {
            return;
        }
        shelf.bytes += bytes;
        let (output, text) = (output.cloned().unwrap_or_default(), Bytes::from_owner(Text { text, _permit: permit }));
        shelf.kept.push_back(Kept { id, previous, input, output, text, bytes });
    }

    /// The text of a response. Its memory stays counted as long as anybody has it.
    pub fn get(&self, id: &str) -> Option<Bytes> {
        self.shelf.lock().kept.iter().find(|kept| kept.id == id).map(|kept| kept.text.clone())
    }

    pub fn remove(&self, id: &str) -> bool {
        let mut shelf = self.shelf.lock();
        let Some(at) = shelf.kept.iter().position(|kept| kept.id == id) else { return false };
        if let Some(gone) = shelf.kept.remove(at) {
            shelf.bytes -= gone.bytes;
        }
        true
    }

    /// All items up to the end of response `id`, oldest first. `None` if it, or one that it goes on from, is not kept.
    ///
    /// # Errors
    /// `count`'s, which is asked for the memory of what is copied, before it is.
    pub fn history(
        &self,
        id: &str,
        count: impl FnOnce(usize) -> Result<(), ApiError>,
    ) -> Result<Option<Vec<Value>>, ApiError> {
        let mut shelf = self.shelf.lock();
        let (mut chain, mut next) = (Vec::new(), Some(id.to_owned()));
        let mut whole = true;
        while let Some(id) = next {
            let at = shelf.kept.iter().position(|kept| kept.id == id);
            let Some(kept) = at.and_then(|at| shelf.kept.remove(at)) else {
                whole = false;
                break;
            };
            next = kept.previous.clone();
            chain.push(kept);
        }
        // They were used last, the newest the very last: the next turn asks for it by its name.
        chain.reverse();
        let items = || chain.iter().flat_map(|kept| kept.input.iter().chain(&kept.output));
        let counted = if whole { count(memory::rendered(items())) } else { Ok(()) };
        let history = (whole && counted.is_ok()).then(|| items().cloned().collect());
        shelf.kept.extend(chain);
        counted.map(|()| history)
    }

    /// An item of the output of some response.
    pub fn item(&self, id: &str) -> Option<Value> {
        let shelf = self.shelf.lock();
        let mut outputs = shelf.kept.iter().rev().flat_map(|kept| &kept.output);
        outputs.find(|item| item["id"] == id).cloned()
    }
}

/// Bytes of a value: its text and names, and what everything in it takes beside.
pub fn size(value: &Value) -> usize {
    const WORD: usize = 128;
    WORD + match value {
        Value::String(text) => text.len(),
        Value::Array(values) => values.iter().map(size).sum(),
        Value::Object(fields) => fields.iter().map(|(name, value)| WORD + name.len() + size(value)).sum(),
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::Metrics;
    use serde_json::json;

    fn store(most: usize, most_bytes: usize) -> Store {
        Store { shelf: Mutex::default(), most, most_bytes, budget: None }
    }

    fn response(id: &str) -> Value {
        json!({"id": id, "output": [{"id": format!("item-{id}")}]})
    }

    #[test]
    fn a_history_is_a_chain() {
        let store = store(10, usize::MAX);
        store.keep(None, vec![json!("q1")], &response("a"));
        store.keep(Some("a".into()), vec![json!("q2"), json!("q3")], &response("b"));
        let wanted = [json!("q1"), json!({"id": "item-a"}), json!("q2"), json!("q3"), json!({"id": "item-b"})];
        let all = |_| Ok(());
        assert_eq!(store.history("b", all).unwrap().unwrap(), wanted);
        let refused = store.history("b", |bytes| Err(ApiError::too_large(bytes))).unwrap_err();
        assert_eq!(refused.message(), ApiError::too_large(memory::rendered(&wanted)).message(), "all of it is counted");
        assert_eq!(store.item("item-a"), Some(json!({"id": "item-a"})));
        assert!(store.remove("a") && !store.remove("a"));
        assert_eq!(store.history("b", all).unwrap(), None);
        assert_eq!(store.get("b").unwrap(), response("b").to_string());
    }

    #[test]
    fn the_least_recently_used_goes_first() {
        let store = store(2, usize::MAX);
        store.keep(None, Vec::new(), &response("a"));
        store.keep(None, Vec::new(), &response("b"));
        store.history("a", |_| Ok(())).unwrap();
        store.keep(None, Vec::new(), &response("c"));
        assert!(store.get("a").is_some() && store.get("b").is_none() && store.get("c").is_some());
        // Of a chain the newest is the last to go.
        store.keep(Some("c".into()), Vec::new(), &response("d"));
        store.history("d", |_| Ok(())).unwrap();
        store.keep(None, Vec::new(), &response("e"));
        assert!(store.get("c").is_none() && store.get("d").is_some());
    }

    /// A client that reads slowly has the store's own bytes, and they are counted until it has them all.
    #[test]
    fn what_is_read_is_shared_and_counted() {
        let metrics = Metrics::new("0", "cpu");
        let store = Store::within(RequestMemory::new(&metrics));
        let held = || metrics.memory_requests.get();
        store.keep(None, Vec::new(), &json!({"id": "a", "output": [], "user": "x".repeat(1000)}));
        let (one, other) = (store.get("a").unwrap(), store.get("a").unwrap());
        assert_eq!(one.as_ptr(), other.as_ptr());
        drop(one);
        assert!(store.remove("a") && held() > 1000);
        drop(other);
        assert_eq!(held(), 0);
    }

    #[test]
    fn bytes_are_bounded() {
        let store = store(100, 10_000);
        for id in 0..50 {
            store.keep(None, vec!["x".repeat(1000).into()], &response(&id.to_string()));
        }
        let shelf = store.shelf.lock();
        assert!(shelf.bytes <= 10_000 && shelf.kept.len() < 10 && !shelf.kept.is_empty());
        assert_eq!(shelf.bytes, shelf.kept.iter().map(|kept| kept.bytes).sum::<usize>());
        drop(shelf);
        store.keep(None, vec!["x".repeat(20_000).into()], &response("large"));
        assert!(store.get("large").is_none() && store.shelf.lock().bytes == 0);
    }
}

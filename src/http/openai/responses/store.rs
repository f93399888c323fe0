//! Stored responses, for `previous_response_id` and `GET /v1/responses/{id}`. The store uses the memory of requests,
//! and evicts the least recently used responses first.

use crate::http::{
    ApiError,
    layers::{MemoryPermit, RequestMemory, memory},
};
use axum::body::Bytes;
use parking_lot::Mutex;
use serde_json::Value;
use std::{collections::VecDeque, sync::Arc};

/// Maximum number of responses in the store.
const MAX_RESPONSES: usize = 1000;

/// Maximum size of all responses in bytes. The store also never exceeds a quarter of the memory of requests.
const MAX_BYTES: usize = 64 << 20;

/// One response with its input.
struct StoredResponse {
    id: String,
    /// Id of the response that this response continues.
    previous: Option<String>,
    input: Vec<Value>,
    output: Vec<Value>,
    /// The whole response as JSON text.
    text: Bytes,
    bytes: usize,
}

/// JSON text of a response. A client may still read the text after the response is evicted, so the text holds its
/// memory permit.
struct ResponseText {
    text: Vec<u8>,
    _permit: Option<MemoryPermit>,
}

impl AsRef<[u8]> for ResponseText {
    fn as_ref(&self) -> &[u8] {
        &self.text
    }
}

/// An item of a response, which stays in memory if the response is evicted.
pub struct StoredItem {
    response: Arc<StoredResponse>,
    index: usize,
}

impl StoredItem {
    pub fn value(&self) -> Option<&Value> {
        self.response.output.get(self.index)
    }
}

#[derive(Default)]
struct StoreEntries {
    /// Stored responses, least recently used first.
    responses: VecDeque<Arc<StoredResponse>>,
    bytes: usize,
}

pub struct ResponseStore {
    entries: Mutex<StoreEntries>,
    max_responses: usize,
    max_bytes: usize,
    memory: Option<Arc<RequestMemory>>,
}

impl Default for ResponseStore {
    fn default() -> Self {
        Self { entries: Mutex::default(), max_responses: MAX_RESPONSES, max_bytes: MAX_BYTES, memory: None }
    }
}

impl ResponseStore {
    /// A store that takes its memory from `memory`.
    pub fn within(memory: Arc<RequestMemory>) -> Arc<Self> {
        let store = Arc::new(Self { memory: Some(memory.clone()), ..Self::default() });
        let weak = Arc::downgrade(&store);
        memory.add_cache(Box::new(move || weak.upgrade().is_some_and(|store| store.evict_oldest())));
        store
    }

    /// Evicts the least recently used response. Returns false if there is none, or if the store itself asks for memory
    /// and therefore holds the lock.
    fn evict_oldest(&self) -> bool {
        let Some(mut entries) = self.entries.try_lock() else { return false };
        let Some(oldest) = entries.responses.pop_front() else { return false };
        entries.bytes -= oldest.bytes;
        true
    }

    /// Stores a response that continues `previous` with `input`. Does nothing if the response does not fit.
    pub fn insert(&self, previous: Option<String>, input: Vec<Value>, response: &Value) {
        let id = response["id"].as_str().unwrap_or_default().to_owned();
        let Ok(mut text) = serde_json::to_vec(response) else { return };
        text.shrink_to_fit();
        let output = response["output"].as_array();
        let bytes =
            text.capacity() + output.into_iter().chain([&input]).flatten().map(memory::value_bytes).sum::<usize>();
        let limit = self.memory.as_ref().map_or(usize::MAX, |memory| memory.total() / 4).min(self.max_bytes);
        let mut entries = self.entries.lock();
        while entries.responses.len() >= self.max_responses || entries.bytes.saturating_add(bytes) > limit {
            // The store is empty, so this response is too large.
            let Some(oldest) = entries.responses.pop_front() else { return };
            entries.bytes -= oldest.bytes;
        }
        let permit = self.memory.as_ref().map(|memory| memory.permit().reserve(bytes));
        let Ok(permit) = permit.transpose() else { return };
        entries.bytes += bytes;
        let output = output.cloned().unwrap_or_default();
        let text = Bytes::from_owner(ResponseText { text, _permit: permit });
        let stored = StoredResponse { id, previous, input, output, text, bytes };
        entries.responses.push_back(Arc::new(stored));
    }

    /// JSON text of a response. The memory of the text stays counted until the last copy is dropped.
    pub fn get(&self, id: &str) -> Option<Bytes> {
        self.entries.lock().responses.iter().find(|response| response.id == id).map(|response| response.text.clone())
    }

    pub fn remove(&self, id: &str) -> bool {
        let mut entries = self.entries.lock();
        let Some(at) = entries.responses.iter().position(|response| response.id == id) else { return false };
        if let Some(removed) = entries.responses.remove(at) {
            entries.bytes -= removed.bytes;
        }
        true
    }

    /// All items up to the end of response `id`, oldest first. `None` if the response, or an earlier response that it
    /// continues, is not stored.
    ///
    /// # Errors
    /// The error of `reserve`, which is called with the bytes of the copies before the items are copied. `reserve` may
    /// evict responses.
    pub fn history(
        &self,
        id: &str,
        reserve: impl FnOnce(usize) -> Result<(), ApiError>,
    ) -> Result<Option<Vec<Value>>, ApiError> {
        let (chain, is_whole) = self.chain(id);
        if !is_whole {
            return Ok(None);
        }
        let items = || chain.iter().flat_map(|response| response.input.iter().chain(&response.output));
        reserve(memory::rendering_bytes(items()))?;
        Ok(Some(items().cloned().collect()))
    }

    /// The items that response `id` answers, oldest first: its input, and all items of the stored responses that it
    /// continues. Each item has a name, for items without an id. `None` if the response is not stored.
    ///
    /// # Errors
    /// The error of `reserve`, as in [`ResponseStore::history`].
    pub fn input_items(
        &self,
        id: &str,
        reserve: impl FnOnce(usize) -> Result<(), ApiError>,
    ) -> Result<Option<Vec<(String, Value)>>, ApiError> {
        let (chain, _) = self.chain(id);
        let items = || {
            chain.iter().enumerate().flat_map(|(at, response)| {
                let output = if at + 1 < chain.len() { &response.output[..] } else { &[] };
                let name = move |index| format!("item_{index}_{}", response.id);
                response.input.iter().chain(output).enumerate().map(move |(index, item)| (name(index), item))
            })
        };
        reserve(memory::rendering_bytes(items().map(|(_, item)| item)))?;
        Ok((!chain.is_empty()).then(|| items().map(|(name, item)| (name, item.clone())).collect()))
    }

    /// The responses up to `id`, oldest first, and whether all of these responses are stored. Marks them as most
    /// recently used.
    fn chain(&self, id: &str) -> (Vec<Arc<StoredResponse>>, bool) {
        let mut entries = self.entries.lock();
        let mut chain = Vec::new();
        let mut next = Some(id.to_owned());
        let mut is_whole = true;
        while let Some(id) = next {
            let at = entries.responses.iter().position(|response| response.id == id);
            let Some(response) = at.and_then(|at| entries.responses.remove(at)) else {
                is_whole = false;
                break;
            };
            next = response.previous.clone();
            chain.push(response);
        }
        // The oldest response is appended first and evicted first, because the next request names the newest response.
        chain.reverse();
        entries.responses.extend(chain.iter().cloned());
        (chain, is_whole)
    }

    /// Finds an item by its id in the output of any response.
    pub fn item(&self, id: &str) -> Option<StoredItem> {
        let entries = self.entries.lock();
        entries.responses.iter().rev().find_map(|response| {
            let index = response.output.iter().position(|item| item["id"] == id)?;
            Some(StoredItem { response: response.clone(), index })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use moestro_base::metrics::Metrics;
    use serde_json::json;

    fn store(max_responses: usize, max_bytes: usize) -> ResponseStore {
        ResponseStore { entries: Mutex::default(), max_responses, max_bytes, memory: None }
    }

    fn response(id: &str) -> Value {
        json!({"id": id, "output": [{"id": format!("item-{id}")}]})
    }

    #[test]
    fn history_follows_the_chain() {
        let store = store(10, usize::MAX);
        store.insert(None, vec![json!("q1")], &response("a"));
        store.insert(Some("a".into()), vec![json!("q2"), json!("q3")], &response("b"));
        let expected = [json!("q1"), json!({"id": "item-a"}), json!("q2"), json!("q3"), json!({"id": "item-b"})];
        let all = |_| Ok(());
        assert_eq!(store.history("b", all).unwrap().unwrap(), expected);
        let refused = store.history("b", |bytes| Err(ApiError::too_large(bytes))).unwrap_err();
        let all_items = ApiError::too_large(memory::rendering_bytes(&expected));
        assert_eq!(refused.message(), all_items.message());
        assert_eq!(store.item("item-a").unwrap().value(), Some(&json!({"id": "item-a"})));
        assert!(store.remove("a") && !store.remove("a"));
        assert_eq!(store.history("b", all).unwrap(), None);
        assert_eq!(store.get("b").unwrap(), response("b").to_string());
    }

    #[test]
    fn least_recently_used_response_is_evicted() {
        let store = store(2, usize::MAX);
        store.insert(None, Vec::new(), &response("a"));
        store.insert(None, Vec::new(), &response("b"));
        store.history("a", |_| Ok(())).unwrap();
        store.insert(None, Vec::new(), &response("c"));
        assert!(store.get("a").is_some() && store.get("b").is_none() && store.get("c").is_some());
        // The newest response of a chain is evicted last.
        store.insert(Some("c".into()), Vec::new(), &response("d"));
        store.history("d", |_| Ok(())).unwrap();
        store.insert(None, Vec::new(), &response("e"));
        assert!(store.get("c").is_none() && store.get("d").is_some());
    }

    /// A response body shares the store's bytes. The bytes stay counted until a slow client has read them.
    #[test]
    fn text_in_use_is_shared_and_counted() {
        let metrics = Metrics::new("0", "cpu");
        let store = ResponseStore::within(RequestMemory::new(&metrics));
        let counted = || metrics.request_memory.get();
        store.insert(None, Vec::new(), &json!({"id": "a", "output": [], "user": "x".repeat(1000)}));
        let one = store.get("a").unwrap();
        let other = store.get("a").unwrap();
        assert_eq!(one.as_ptr(), other.as_ptr());
        drop(one);
        assert!(store.remove("a") && counted() > 1000);
        drop(other);
        assert_eq!(counted(), 0);
    }

    /// A store with the responses 0 to 3, each of which takes a twentieth of the memory.
    fn filled_store() -> (Arc<RequestMemory>, Arc<ResponseStore>, usize) {
        let memory = RequestMemory::new(&Metrics::new("0", "cpu"));
        let store = ResponseStore::within(memory.clone());
        let total = memory.total();
        for id in 0..4 {
            store.insert(None, vec!["x".repeat(total / 20).into()], &response(&id.to_string()));
        }
        (memory, store, total)
    }

    #[test]
    fn responses_are_evicted_for_requests() {
        let (memory, store, total) = filled_store();
        assert!(store.get("0").is_some());
        let mut one = memory.permit();
        let mut other = memory.permit();
        one.resize(total / 2).unwrap();
        other.resize(total / 6).unwrap();
        assert!(store.get("0").is_none() && store.get("3").is_some());
    }

    #[test]
    fn history_evicts_other_responses_for_its_copy() {
        let (memory, store, total) = filled_store();
        let mut other = memory.permit();
        let mut own = memory.permit();
        other.resize(total / 2).unwrap();
        let items = store.history("3", |_| own.resize(total / 6)).unwrap().unwrap();
        assert_eq!(items.len(), 2);
        assert!(store.get("0").is_none() && store.get("3").is_some());
    }

    #[test]
    fn store_stays_within_its_bytes() {
        let store = store(100, 10_000);
        for id in 0..50 {
            store.insert(None, vec!["x".repeat(1000).into()], &response(&id.to_string()));
        }
        let entries = store.entries.lock();
        assert!(entries.bytes <= 10_000 && entries.responses.len() < 10 && !entries.responses.is_empty());
        assert_eq!(entries.bytes, entries.responses.iter().map(|response| response.bytes).sum::<usize>());
        drop(entries);
        store.insert(None, vec!["x".repeat(20_000).into()], &response("large"));
        assert!(store.get("large").is_none() && store.entries.lock().bytes == 0);
    }
}

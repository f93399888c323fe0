//! [`RememberedTools`]: tools of earlier requests, for `--reuse-tools`.
//!
//! Tools are at the start of a prompt. Some agents send no tools when they ask for a summary of a conversation, so the
//! cached prompt of the conversation is not a prefix of the new prompt. With this setting, such a request gets the tools
//! of the conversation, and its answer has no calls: it is the same request as with these tools and `tool_choice: none`.
//!
//! A request continues a conversation if all messages before one of its assistant messages are known: an earlier request
//! had the same messages before an assistant message, or had no others. The longest known part selects the tools.
//! Another system prompt is another conversation, because the cached prompt differs there in any case.

use crate::http::{
    layers::{MemoryPermit, RequestMemory, value_bytes},
    request::{ImagePart, ImageSource},
};
use moestro_chat::{Message, Part, Role};
use parking_lot::Mutex;
use serde_json::Value;
use std::{
    collections::{HashSet, VecDeque},
    hash::{BuildHasher, Hash, Hasher, RandomState},
    sync::Arc,
};

/// Maximum number of lists of tools.
const MAX_LISTS: usize = 64;

/// Maximum size of all lists in bytes. The lists also never exceed an eighth of the memory of requests.
const MAX_BYTES: usize = 32 << 20;

/// Bytes of memory per hash, with the spare capacity of its set.
const HASH_BYTES: usize = 32;

pub struct RememberedTools {
    keys: RandomState,
    /// The lists of tools, least recently used first.
    lists: Mutex<VecDeque<ToolList>>,
    max_lists: usize,
    max_bytes: usize,
    memory: Arc<RequestMemory>,
}

/// The tools of a request, and hashes of the conversations that had these tools. Owners share no lists, so that the use of a
/// list by one owner does not change which tools another owner gets.
struct ToolList {
    owner: u64,
    tools: Arc<[Value]>,
    conversations: HashSet<u64>,
    permit: MemoryPermit,
}

/// Hashes of the owner and of the beginnings of a conversation, shortest first. Each covers the owner.
struct Beginnings {
    owner: u64,
    /// Each ends before an assistant message.
    answered: Vec<u64>,
    whole: u64,
}

impl RememberedTools {
    /// An empty memory, which takes its bytes from `memory`.
    pub fn within(memory: Arc<RequestMemory>) -> Arc<Self> {
        Self::with_limits(memory, MAX_LISTS, MAX_BYTES)
    }

    fn with_limits(memory: Arc<RequestMemory>, max_lists: usize, max_bytes: usize) -> Arc<Self> {
        let keys = RandomState::new();
        let remembered = Arc::new(Self { keys, lists: Mutex::default(), max_lists, max_bytes, memory: memory.clone() });
        let weak = Arc::downgrade(&remembered);
        memory.add_cache(Box::new(move || weak.upgrade().is_some_and(|remembered| remembered.evict_oldest())));
        remembered
    }

    /// Evicts the least recently used list. Returns false if there is none, or if a list is being stored.
    fn evict_oldest(&self) -> bool {
        self.lists.try_lock().is_some_and(|mut lists| lists.pop_front().is_some())
    }

    /// Stores the tools of a request with tools. Returns the tools for a request without tools, if they are known. `owner`
    /// is the key, the salt and the model of the request.
    pub fn find_or_insert(
        &self,
        owner: impl Hash,
        tools: &[Value],
        messages: &[Message<ImagePart>],
    ) -> Option<Arc<[Value]>> {
        let beginnings = self.beginnings(owner, messages);
        if tools.is_empty() {
            return self.find(&beginnings);
        }
        self.insert(tools, &beginnings);
        None
    }

    fn beginnings(&self, owner: impl Hash, messages: &[Message<ImagePart>]) -> Beginnings {
        let mut hasher = self.keys.build_hasher();
        owner.hash(&mut hasher);
        let owner = hasher.finish();
        let mut answered = Vec::new();
        for (index, message) in messages.iter().enumerate() {
            hash_message(message, &mut hasher);
            // A system prompt alone is not a conversation.
            let is_answered = messages.get(index + 1).is_some_and(|next| next.role == Role::Assistant);
            if is_answered && message.role != Role::System {
                answered.push(hasher.finish());
            }
        }
        Beginnings { owner, answered, whole: hasher.finish() }
    }

    fn find(&self, beginnings: &Beginnings) -> Option<Arc<[Value]>> {
        let mut lists = self.lists.lock();
        let with = |hash| lists.iter().rposition(|list| list.conversations.contains(hash));
        let at = beginnings.answered.iter().rev().find_map(with)?;
        let list = lists.remove(at)?;
        let tools = list.tools.clone();
        lists.push_back(list);
        Some(tools)
    }

    /// Stores tools as most recently used. Forgets the tools if they do not fit.
    fn insert(&self, tools: &[Value], beginnings: &Beginnings) {
        let mut lists = self.lists.lock();
        let is_same = |list: &ToolList| list.owner == beginnings.owner && *list.tools == *tools;
        let known = lists.iter().position(is_same).and_then(|at| lists.remove(at));
        let mut list = known.unwrap_or_else(|| ToolList {
            owner: beginnings.owner,
            tools: Arc::default(),
            conversations: HashSet::new(),
            permit: self.memory.permit(),
        });
        let mut new = beginnings.answered.clone();
        new.push(beginnings.whole);
        new.retain(|hash| !list.conversations.contains(hash));
        let hashes = list.conversations.len() + new.len();
        let bytes = tools.iter().map(value_bytes).sum::<usize>() + hashes * HASH_BYTES;
        let limit = self.max_bytes.min(self.memory.total() / 8);
        if bytes > limit {
            return;
        }
        while lists.len() >= self.max_lists || total_bytes(&lists).saturating_add(bytes) > limit {
            lists.pop_front();
        }
        if list.permit.resize(bytes).is_err() {
            return;
        }
        if list.tools.is_empty() {
            list.tools = tools.into();
        }
        list.conversations.extend(new);
        lists.push_back(list);
    }
}

fn total_bytes(lists: &VecDeque<ToolList>) -> usize {
    lists.iter().map(|list| list.permit.bytes()).sum()
}

/// Hashes what identifies a message: its role, content and calls. Reasoning does not count, because some agents send it
/// only in some requests, and templates leave out the reasoning of earlier turns.
fn hash_message(message: &Message<ImagePart>, hasher: &mut impl Hasher) {
    (message.role as u8).hash(hasher);
    let parts = message.content.as_ref().map_or(&[][..], |content| &content.parts);
    parts.len().hash(hasher);
    for part in parts {
        match part {
            Part::Text(text) => text.hash(hasher),
            Part::Tool(name) => ("tool", name).hash(hasher),
            Part::Image(image) => match &image.source {
                ImageSource::Base64(data) => ("base64", data).hash(hasher),
                ImageSource::Url(url) => ("url", url).hash(hasher),
                ImageSource::Invalid(reason) => ("invalid", reason).hash(hasher),
            },
        }
    }
    message.calls.len().hash(hasher);
    message.calls.iter().for_each(|call| call.0["function"].hash(hasher));
}

#[cfg(test)]
mod tests {
    use super::*;
    use moestro_base::metrics::Metrics;
    use serde_json::json;
    use test_support::mutate::Dice;

    fn memory() -> Arc<RequestMemory> {
        RequestMemory::new(&Metrics::new("0", "cpu"))
    }

    fn tools(name: &str) -> Vec<Value> {
        vec![json!({"type": "function", "function": {"name": name, "description": "d".repeat(100)}})]
    }

    /// A message for each word. The first letter is the role: system, user or assistant.
    fn messages(text: &str) -> Vec<Message<ImagePart>> {
        let message = |word: &str| {
            let role = match &word[..1] {
                "s" => Role::System,
                "u" => Role::User,
                _ => Role::Assistant,
            };
            Message::new(role, word.to_owned())
        };
        text.split_whitespace().map(message).collect()
    }

    impl RememberedTools {
        fn store(&self, owner: &str, name: &str, text: &str) {
            self.insert(&tools(name), &self.beginnings(owner, &messages(text)));
        }

        /// The name of the tool that a request with this conversation gets.
        fn found(&self, owner: &str, text: &str) -> Option<String> {
            let found = self.find(&self.beginnings(owner, &messages(text)))?;
            found[0]["function"]["name"].as_str().map(str::to_owned)
        }
    }

    #[test]
    fn continued_conversation_finds_its_tools() {
        let remembered = RememberedTools::within(memory());
        remembered.store("key", "f", "s u1 a1 u2");
        let found = Some("f".to_owned());
        assert_eq!(remembered.found("key", "s u1 a1 u2 a2 u3"), found, "the whole conversation is continued");
        assert_eq!(remembered.found("key", "s u1 a1 other a9 u3"), found, "its beginning is continued");
        for other in ["s u1", "s2 u1 a1 u2 a2 u3", "s u9 a1 u2", "u1 a1 u2 a2 u3", "s a1 u1"] {
            assert_eq!(remembered.found("key", other), None, "{other}");
        }
        assert_eq!(remembered.found("other key", "s u1 a1 u2 a2 u3"), None);
    }

    /// Requests of three owners with the same conversations and tools, compared with a memory for each owner.
    #[test]
    fn owners_do_not_change_each_others_tools() {
        let owners = ["key", "other key", "third key"];
        let alone = owners.map(|_| RememberedTools::within(memory()));
        let together = RememberedTools::within(memory());
        let mut dice = Dice(1);
        let mut roll = |sides: usize| dice.below(sides);
        let mut found = 0;
        for _ in 0..3000 {
            let owner = roll(3);
            let turns = 1 + roll(3);
            let text: Vec<_> = (0..turns).map(|turn| format!("u{turn}{} a{turn} ", roll(2))).collect();
            let text = format!("s {}u{}", text.concat(), roll(2));
            let name = ["f", "g", "h"][roll(3)];
            if roll(2) == 0 {
                [&alone[owner], &together].iter().for_each(|memory| memory.store(owners[owner], name, &text));
                continue;
            }
            let tools = together.found(owners[owner], &text);
            assert_eq!(tools, alone[owner].found(owners[owner], &text), "{}: {text}", owners[owner]);
            found += usize::from(tools.is_some());
        }
        assert!(found > 1000, "{found}");
    }

    #[test]
    fn system_prompt_alone_is_no_conversation() {
        let remembered = RememberedTools::within(memory());
        remembered.store("key", "f", "s a0 u1");
        assert_eq!(remembered.found("key", "s a9 u1"), None);
        assert_eq!(remembered.found("key", "s a0 u1 a1 u2"), Some("f".into()));
    }

    #[test]
    fn longest_known_beginning_selects_the_tools() {
        let remembered = RememberedTools::within(memory());
        remembered.store("key", "long", "s u1 a1 u2");
        remembered.store("key", "short", "s u1");
        assert_eq!(remembered.found("key", "s u1 a1 u2 a2 u3"), Some("long".into()));
        assert_eq!(remembered.found("key", "s u1 a7 u2"), Some("long".into()), "used most recently");
        remembered.store("key", "short", "s u1");
        assert_eq!(remembered.found("key", "s u1 a7 u2"), Some("short".into()), "used most recently");
    }

    #[test]
    fn images_and_calls_distinguish_messages() {
        let remembered = RememberedTools::within(memory());
        let image = |data: &str, is_new| {
            let source = ImageSource::Base64(data.into());
            let image = ImagePart { source, low_detail: false, at: String::new(), is_new, separator: "" };
            let content = moestro_chat::Content { parts: vec![Part::Image(image)] };
            vec![Message::new(Role::User, content), Message::new(Role::Assistant, "a".to_owned())]
        };
        remembered.insert(&tools("f"), &remembered.beginnings("key", &image("AAAA", true)));
        assert!(remembered.find(&remembered.beginnings("key", &image("AAAA", false))).is_some());
        assert!(remembered.find(&remembered.beginnings("key", &image("AAAB", false))).is_none());
        let after_call = |path: &str, reasoning: &str| {
            let call = moestro_chat::ToolCall::new("1".into(), "read", json!({"path": path}));
            let mut messages = messages("u1 a1 u2 a2");
            messages[1] = Message::assistant(String::new(), reasoning.into(), vec![call]);
            remembered.beginnings("key", &messages[1..])
        };
        remembered.insert(&tools("g"), &after_call("x", "thought"));
        assert!(remembered.find(&after_call("x", "")).is_some(), "reasoning does not count");
        assert!(remembered.find(&after_call("y", "thought")).is_none());
    }

    #[test]
    fn memory_is_bounded() {
        let memory = memory();
        let remembered = RememberedTools::with_limits(memory.clone(), 3, 8 << 10);
        for number in 0..50 {
            remembered.store("key", &format!("f{number}"), &format!("u{number}"));
            assert!(memory.used() <= 8 << 10 && remembered.lists.lock().len() <= 3);
        }
        let newest = (0..50).filter(|number| remembered.found("key", &format!("u{number} a u")).is_some());
        assert_eq!(newest.collect::<Vec<_>>(), [47, 48, 49]);
        // Many conversations with the same tools are bounded, too.
        for number in 0..5000 {
            remembered.store("key", "same", &format!("u{number}"));
            assert!(memory.used() <= 8 << 10);
        }
        assert!(remembered.evict_oldest());
        while remembered.evict_oldest() {}
        assert_eq!(memory.used(), 0);
        assert_eq!(remembered.found("key", "u4999 a u"), None);
        let large = RememberedTools::with_limits(memory.clone(), 3, 100);
        large.store("key", "f", "u1");
        assert_eq!((large.found("key", "u1 a u"), memory.used()), (None, 0));
    }
}

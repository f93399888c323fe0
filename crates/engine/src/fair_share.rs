//! Fair use of a queue: who a client is, and which waiting requests a full queue gives up.
//!
//! A client is identified by its address, then by its key, then by its user. Keys and users are what a client
//! says, so a client could invent many. It then competes only with clients of the same address, or of the same address
//! and key.

use std::{
    collections::HashMap,
    hash::{DefaultHasher, Hash, Hasher},
    ops::RangeInclusive,
    time::Duration,
};

/// Number of groups that a client belongs to: its address, its key and its user.
pub const GROUPS: usize = 3;

/// Divisor of the age of the oldest waiting request. While the queue gets on by this share, many places become free.
const RETRY_SHARE: u32 = 8;

/// Number of waiting requests for each second. Requests that arrived together are all young, however many they are.
const PER_SECOND: usize = 8;

/// Bounds in seconds of the time after which a refused client should try again. Client libraries ignore times over a
/// minute.
const RETRY_SECONDS: RangeInclusive<u64> = 2..=30;

/// Identifies a client by the groups that it belongs to. The hash of a group includes the groups before it, so that
/// users of different keys are different groups.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ClientId {
    pub groups: [u64; GROUPS],
}

impl ClientId {
    pub fn new(address: impl Hash, key: impl Hash, user: impl Hash) -> Self {
        fn group(parent: u64, part: impl Hash) -> u64 {
            let mut hasher = DefaultHasher::new();
            (parent, part).hash(&mut hasher);
            hasher.finish()
        }
        let address = group(0, address);
        let key = group(address, key);
        Self { groups: [address, key, group(key, user)] }
    }
}

/// A waiting request's share of a queue.
#[derive(Debug, Clone, Copy, Default)]
pub struct QueueShare {
    pub client: ClientId,
    /// Memory that the request holds while it waits.
    pub bytes: usize,
}

/// Limits of a queue.
#[derive(Debug, Clone, Copy)]
pub struct QueueLimits {
    pub requests: usize,
    /// Memory of all waiting requests together. One request may wait even if it holds more.
    pub bytes: usize,
}

impl QueueLimits {
    /// Makes room for a new request. `waiting` has the requests in order of arrival. Returns the indices of those that
    /// the queue gives up for the new request, in ascending order, or `None` if the new request is refused.
    ///
    /// The queue gives up the newest requests of the client that has most, but only as long as that client keeps as
    /// much as the new request's client has then. Clients that try again therefore do not replace each other.
    pub fn make_room(&self, waiting: &[QueueShare], new: QueueShare) -> Option<Vec<usize>> {
        let mut kept: Vec<_> = waiting.iter().copied().enumerate().collect();
        let mut given_up = Vec::new();
        while kept.len() >= self.requests {
            given_up.push(give_up(&mut kept, new.client, 1, |_| 1)?);
        }
        let held = |kept: &[(usize, QueueShare)]| kept.iter().map(|(_, share)| share.bytes).sum::<usize>();
        while !kept.is_empty() && held(&kept).saturating_add(new.bytes) > self.bytes {
            given_up.push(give_up(&mut kept, new.client, new.bytes, |share| share.bytes)?);
        }
        given_up.sort_unstable();
        Some(given_up)
    }
}

/// Removes one request from `kept` and returns its index in the queue. `size` is the size of a request in the limit
/// that is exceeded, and `new_size` that of the new request of `client`.
fn give_up(
    kept: &mut Vec<(usize, QueueShare)>,
    client: ClientId,
    new_size: usize,
    size: impl Fn(&QueueShare) -> usize,
) -> Option<usize> {
    let at = (0..GROUPS).find_map(|level| find_victim(kept, client, level, new_size, &size))?;
    Some(kept.remove(at).0)
}

/// Finds the request that makes room among the requests that share the groups of `client` above `level`: the newest
/// request of the largest group at `level`, and of the largest groups in it. Returns the request's position in `kept`,
/// or `None` if its group would then have less than the group of `client`.
fn find_victim(
    kept: &[(usize, QueueShare)],
    client: ClientId,
    level: usize,
    new_size: usize,
    size: &impl Fn(&QueueShare) -> usize,
) -> Option<usize> {
    let is_peer = |share: &QueueShare| share.client.groups[..level] == client.groups[..level];
    let peers = kept.iter().map(|(_, share)| share).enumerate();
    let mut group: Vec<_> = peers.filter(|(_, share)| is_peer(share) && size(share) > 0).collect();
    let sizes_at = |part: usize, group: &[(usize, &QueueShare)]| {
        let mut sizes = HashMap::<u64, usize>::new();
        group.iter().for_each(|(_, share)| *sizes.entry(share.client.groups[part]).or_default() += size(share));
        sizes
    };
    let mut sizes = sizes_at(level, &group);
    let own = new_size + sizes.remove(&client.groups[level]).unwrap_or(0);
    let has = keep_largest(&mut group, level, &sizes)?;
    for part in level + 1..GROUPS {
        let sizes = sizes_at(part, &group);
        keep_largest(&mut group, part, &sizes)?;
    }
    let (at, newest) = *group.last()?;
    (own <= has - size(newest)).then_some(at)
}

/// Keeps the requests of the largest group at `level`, and returns its size. Among equally large groups, the one with
/// the newest request. `sizes` has the size of each group that may be kept.
fn keep_largest(group: &mut Vec<(usize, &QueueShare)>, level: usize, sizes: &HashMap<u64, usize>) -> Option<usize> {
    let size = |share: &QueueShare| sizes.get(&share.client.groups[level]).copied();
    let (_, largest) = *group.iter().max_by_key(|(_, share)| size(share))?;
    let largest_size = size(largest)?;
    group.retain(|(_, share)| share.client.groups[level] == largest.client.groups[level]);
    Some(largest_size)
}

/// Time in seconds after which a refused client should try again, if the oldest of `waiting` requests has waited for
/// `longest`.
pub fn retry_seconds(waiting: usize, longest: Duration) -> u32 {
    let seconds = (longest / RETRY_SHARE).as_secs().max((waiting / PER_SECOND) as u64);
    seconds.clamp(*RETRY_SECONDS.start(), *RETRY_SECONDS.end()) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A share of one byte of a client with this address, key and user.
    fn share([address, key, user]: [u64; GROUPS]) -> QueueShare {
        QueueShare { client: ClientId::new(address, key, user), bytes: 1 }
    }

    fn room(limits: [usize; 2], waiting: &[QueueShare], new: QueueShare) -> Option<Vec<usize>> {
        QueueLimits { requests: limits[0], bytes: limits[1] }.make_room(waiting, new)
    }

    #[test]
    fn full_queue_gives_up_largest_clients_newest() {
        let [a, b, c] = [1, 2, 3].map(|key| share([0, key, 0]));
        let full = |waiting: &[QueueShare], new| room([waiting.len(), 100], waiting, new);
        assert_eq!(full(&[a, b, a, a, b], c), Some(vec![3]));
        assert_eq!(full(&[a, a, a, b, a], b), Some(vec![4]));
        // A tie, and a difference that the exchange would only turn around, refuse the newcomer.
        assert_eq!(full(&[a, a, b, b], b), None);
        assert_eq!(full(&[a, a, b], b), None);
        assert_eq!(full(&[a], b), None);
        assert_eq!(full(&[a, a, a], a), None);
        assert_eq!(full(&[], a), None);
        assert_eq!(room([4, 100], &[a, a, a], a), Some(vec![]));
    }

    #[test]
    fn invented_keys_and_users_gain_nothing() {
        // One address with a new key for each request, and one key with a new user for each request.
        let keys: Vec<_> = (0..8).map(|key| share([1, key, 0])).collect();
        let users: Vec<_> = (0..8).map(|user| share([1, 1, user])).collect();
        for many in [keys, users] {
            assert_eq!(room([8, 100], &many, share([2, 0, 0])), Some(vec![7]));
        }
        let users: Vec<_> = (0..8).map(|user| share([1, 1, user])).collect();
        assert_eq!(room([8, 100], &users, share([1, 2, 0])), Some(vec![7]));
        // A new user of a key that has its share replaces only a request of that key.
        let [a, b] = [share([1, 1, 0]), share([1, 2, 0])];
        assert_eq!(room([4, 100], &[a, a, b, b], share([1, 2, 9])), Some(vec![3]));
        assert_eq!(room([4, 100], &[a, a, a, b], share([1, 2, 9])), Some(vec![2]));
        // Within the largest client, the largest user gives up a request, although another user's is newer.
        let [one, two] = [share([1, 1, 1]), share([1, 1, 2])];
        assert_eq!(room([4, 100], &[one, one, one, two], share([1, 2, 0])), Some(vec![2]));
    }

    #[test]
    fn users_of_one_key_share_its_places() {
        let [a, b, other] = [share([1, 1, 1]), share([1, 1, 2]), share([2, 1, 1])];
        assert_eq!(room([6, 100], &[a, a, a, other, other, other], b), Some(vec![2]));
    }

    #[test]
    fn bytes_are_limited_and_shared() {
        let of = |key, bytes| QueueShare { bytes, ..share([0, key, 0]) };
        let waiting = [of(1, 30), of(1, 30), of(2, 10), of(1, 20)];
        assert_eq!(room([9, 100], &waiting, of(2, 10)), Some(vec![]));
        assert_eq!(room([9, 100], &waiting, of(2, 11)), Some(vec![3]));
        assert_eq!(room([9, 80], &[of(1, 30), of(1, 30), of(2, 10), of(1, 5)], of(3, 20)), Some(vec![1, 3]));
        // The largest client keeps as much as the newcomer's client gets.
        assert_eq!(room([9, 100], &waiting, of(3, 61)), None);
        assert_eq!(room([9, 100], &waiting, of(1, 11)), None);
        assert_eq!(room([9, 100], &[of(1, 90)], of(2, 11)), None);
        assert_eq!(room([9, 100], &[], of(1, 500)), Some(vec![]), "a request that nothing waits before");
        // A request without bytes is never dropped to make room for bytes.
        assert_eq!(room([9, 100], &[of(1, 60), of(1, 30), of(1, 0)], of(2, 20)), Some(vec![1]));
    }

    #[test]
    fn longer_queue_has_a_longer_retry() {
        let after = |seconds| retry_seconds(16, Duration::from_secs(seconds));
        assert_eq!([0, 40, 80, 3600].map(after), [2, 5, 10, 30]);
        assert_eq!([0, 40, 100, 512].map(|waiting| retry_seconds(waiting, Duration::ZERO)), [2, 5, 12, 30]);
    }
}

//! [`Turns`]: which waiting request is next. Clients get equal parts of the time: addresses, then the keys of an address,
//! then the users of a key.
//!
//! This is weighted fair queueing (Demers, Keshav and Shenker 1989) with work instead of time. The work of a request is the
//! number of its prompt tokens that are not cached, and a fixed number for the rest. Each group has a clock for its members,
//! which advances by the work of a request divided by the number of members that wait. A request starts on this clock when
//! it arrives, or when the last request of its member ends, and ends after its work. The member whose request ends first is
//! next. So a short request passes long ones of other clients, and a long request is not passed without limit.

use super::fair_share::{ClientId, GROUPS};
use std::collections::{HashMap, HashSet};

/// Work of a request besides its prompt: its answer, and the fixed time of each pass. In a simulation of 32 clients with
/// answers of 16 tokens, the longest wait is 1.8 of the fair share with this value, and 3.0 and 4.4 with half and twice it.
const ANSWER_WORK: u64 = 512;

/// The group that contains all addresses.
const ALL: u64 = 0;

/// The data of a waiting request that decide its turn.
pub struct Arrival {
    client: ClientId,
    work: u64,
    /// The clocks of the groups that contain the client's groups, when the request arrived.
    clocks: [u64; GROUPS],
}

#[derive(Default)]
pub struct Turns {
    /// The groups that wait, and those that would gain if they were forgotten.
    groups: HashMap<u64, Group>,
    /// Number of requests taken so far.
    taken: u64,
}

#[derive(Default, Clone, Copy)]
struct Group {
    /// The group that contains this one.
    parent: u64,
    /// Clock for the members of this group.
    clock: u64,
    /// When the last request of this group ends, on the clock of the parent.
    end: u64,
    /// Value of [`Turns::taken`] after the last request of this group was taken.
    last_taken: u64,
}

fn parents(client: &ClientId) -> [u64; GROUPS] {
    let [address, key, _] = client.groups;
    [ALL, address, key]
}

/// Divides the requests at `members` by their groups at `level`.
fn divide(waiting: &[&Arrival], members: &[usize], level: usize) -> HashMap<u64, Vec<usize>> {
    let mut parts = HashMap::<u64, Vec<usize>>::new();
    members.iter().for_each(|&index| parts.entry(waiting[index].client.groups[level]).or_default().push(index));
    parts
}

impl Turns {
    /// A request that arrives now. `new_tokens` is the number of tokens of its prompt that are not cached.
    pub fn arrive(&self, client: ClientId, new_tokens: usize) -> Arrival {
        let clocks = parents(&client).map(|parent| self.group(parent).clock);
        Arrival { client, work: new_tokens as u64 + ANSWER_WORK, clocks }
    }

    /// Index of the next request. `waiting` has all waiting requests in order of arrival.
    pub fn next(&self, waiting: &[&Arrival]) -> Option<usize> {
        self.first(waiting, &Vec::from_iter(0..waiting.len()), 0)
    }

    /// The next of the requests at `members`, whose groups above `level` are equal. The requests of one user are in order
    /// of arrival. If requests end at the same time, the group that has waited longest for its turn is first.
    fn first(&self, waiting: &[&Arrival], members: &[usize], level: usize) -> Option<usize> {
        if level == GROUPS {
            return members.first().copied();
        }
        let candidates = divide(waiting, members, level).into_iter().filter_map(|(id, members)| {
            let index = self.first(waiting, &members, level + 1)?;
            let end = self.start(waiting, id, &members, level) + waiting[index].work;
            Some((end, self.group(id).last_taken, index))
        });
        candidates.min().map(|(.., index)| index)
    }

    /// When the next request of group `id` starts. `members` are the waiting requests of this group.
    fn start(&self, waiting: &[&Arrival], id: u64, members: &[usize], level: usize) -> u64 {
        let arrived = members.iter().map(|&index| waiting[index].clocks[level]).min();
        self.group(id).end.max(arrived.unwrap_or(0))
    }

    fn group(&self, id: u64) -> Group {
        self.groups.get(&id).copied().unwrap_or_default()
    }

    /// Records that the request at `index` is taken.
    pub fn take(&mut self, waiting: &[&Arrival], index: usize) {
        let Some(Arrival { client, work, .. }) = waiting.get(index) else { return };
        self.taken += 1;
        let mut members = Vec::from_iter(0..waiting.len());
        for (level, (parent, id)) in parents(client).into_iter().zip(client.groups).enumerate() {
            let is_alone = members.len() == 1;
            if is_alone {
                // No request waits for the time that the other members have had.
                self.groups.retain(|other, group| group.parent != parent || *other == id);
            }
            let mut parts = divide(waiting, &members, level);
            let count = parts.len() as u64;
            members = parts.remove(&id).unwrap_or_default();
            let end = self.start(waiting, id, &members, level) + work;
            let clock = &mut self.groups.entry(parent).or_default().clock;
            *clock += (work / count).max(1);
            *clock = if is_alone { end.max(*clock) } else { *clock };
            let group = Group { parent, end, last_taken: self.taken, ..self.group(id) };
            self.groups.insert(id, group);
        }
        self.forget(waiting);
    }

    /// Forgets groups that do not wait and whose last request has ended on the clock.
    fn forget(&mut self, waiting: &[&Arrival]) {
        let is_waiting: HashSet<u64> = waiting.iter().flat_map(|arrival| arrival.client.groups).collect();
        let clocks: HashMap<u64, u64> = self.groups.iter().map(|(&id, group)| (id, group.clock)).collect();
        let taken = self.taken;
        self.groups.retain(|id, group| {
            let ends_later = clocks.get(&group.parent).is_some_and(|&clock| group.end > clock);
            *id == ALL || ends_later || group.last_taken == taken || is_waiting.contains(id)
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The waiting requests, each with a name.
    #[derive(Default)]
    struct Queue {
        turns: Turns,
        waiting: Vec<(&'static str, Arrival)>,
    }

    impl Queue {
        fn push(&mut self, name: &'static str, [address, key, user]: [u64; GROUPS], tokens: usize) {
            let arrival = self.turns.arrive(ClientId::new(address, key, user), tokens);
            self.waiting.push((name, arrival));
        }

        fn take(&mut self) -> &'static str {
            let waiting: Vec<_> = self.waiting.iter().map(|(_, arrival)| arrival).collect();
            let next = self.turns.next(&waiting).unwrap();
            self.turns.take(&waiting, next);
            self.waiting.remove(next).0
        }

        fn take_all(&mut self) -> Vec<&'static str> {
            (0..self.waiting.len()).map(|_| self.take()).collect()
        }
    }

    #[test]
    fn equal_requests_take_turns() {
        let mut queue = Queue::default();
        queue.push("x", [1, 1, 1], 9);
        queue.take();
        for (name, client) in [
            ("1.1.1", [1, 1, 1]),
            ("1.1.1 again", [1, 1, 1]),
            ("1.1.2", [1, 1, 2]),
            ("1.2.1", [1, 2, 1]),
            ("2.1.1", [2, 1, 1]),
            ("2.1.1 again", [2, 1, 1]),
        ] {
            queue.push(name, client, 9);
        }
        assert_eq!(queue.take_all(), ["2.1.1", "1.2.1", "2.1.1 again", "1.1.2", "1.1.1", "1.1.1 again"]);
    }

    #[test]
    fn short_request_passes_long_ones_of_others() {
        let mut queue = Queue::default();
        (1..).zip(["long 1", "long 2", "long 3"]).for_each(|(user, name)| queue.push(name, [0, 0, user], 6000));
        queue.push("short", [0, 0, 4], 10);
        queue.push("after long 1", [0, 0, 1], 10);
        assert_eq!(queue.take_all(), ["short", "long 1", "long 2", "long 3", "after long 1"]);
    }

    #[test]
    fn long_request_lets_equal_work_pass() {
        for others in 1..20 {
            for is_new in [false, true] {
                let mut queue = Queue::default();
                queue.push("long", [0, 0, 0], 6000);
                let mut passed = 0;
                let mut user = 0;
                loop {
                    while queue.waiting.len() <= others as usize {
                        user += 1;
                        queue.push("short", [0, 0, if is_new { user } else { 1 + user % others }], 10);
                    }
                    if queue.take() == "long" {
                        break;
                    }
                    passed += 1;
                }
                // Each other client has had as much work as the long request needs. A new user for each request gains one
                // part.
                let fair = (others + u64::from(is_new)) * (6000 + ANSWER_WORK) / (10 + ANSWER_WORK);
                let range = fair / 2..=fair + 2 * others;
                assert!(range.contains(&passed), "{others} clients, {is_new}: {passed} of {range:?}");
            }
        }
    }

    #[test]
    fn only_waiting_clients_have_debts() {
        let mut queue = Queue::default();
        for user in 0..10_000 {
            queue.push("x", [user % 7, user % 11, user], 10 + user as usize % 900);
            if user > 50 {
                queue.take();
            }
        }
        assert!(queue.turns.groups.len() < 400, "{} groups", queue.turns.groups.len());
        queue.take_all();
        assert!(queue.turns.groups.len() <= 1 + GROUPS, "{} groups", queue.turns.groups.len());
        // Requests that ended while no request waited no longer count.
        queue.push("long", [1, 1, 1], 60_000);
        queue.take();
        queue.push("first", [1, 1, 1], 9);
        queue.push("second", [2, 2, 2], 10);
        assert_eq!(queue.take_all(), ["first", "second"]);
    }
}

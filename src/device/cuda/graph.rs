//! Launches that are handed over together, as one graph: a token's chain of some hundred launches is made once and replayed, and only
//! launches whose arguments differ from the last time are told so. Handed over one by one, each launch costs the CPU several
//! microseconds and the card a pause.
//!
//! In a graph a launch may begin before the one in front of it has ended, up to its `AWAIT` (`kernels/README.md`): on Hopper and
//! later, where the kernels have such a word.

use super::launch::Launch;
use cudarc::driver::{
    result::DriverError,
    sys::{self, CUgraph, CUgraphDependencyType, CUgraphEdgeData, CUgraphExec, CUgraphNode, CUstream},
};
use std::{
    collections::HashMap,
    hash::{DefaultHasher, Hash, Hasher},
    ptr,
};

/// Fewer launches are handed over one by one.
const LEAST: usize = 4;
/// A chain becomes a graph when it is seen so often: an answer's, and not a prompt's, whose long launches would gain less than
/// making a graph costs.
const SIGHTS: u32 = 8;
/// Chains that are remembered.
const MOST: usize = 128;
/// The driver that lets launches of a graph begin early: CUDA 12.3.
const DRIVER: i32 = 12030;
/// The port of a kernel's node behind which those begin that may begin early.
const EARLY: u8 = 1;

/// Chains by their kernels and addresses.
pub struct Graphs {
    chains: HashMap<u64, Seen>,
    clock: u64,
    /// The driver knows all that is needed.
    works: bool,
    /// Launches may begin early.
    early: bool,
}

/// A chain that was seen, last at `last`.
#[derive(Default)]
struct Seen {
    last: u64,
    times: u32,
    chain: Option<Chain>,
}

impl Graphs {
    /// `driver` is its version as a number, `capability` the card's.
    pub fn new(driver: i32, capability: (i32, i32)) -> Self {
        Self { chains: HashMap::new(), clock: 0, works: driver >= DRIVER, early: capability >= (9, 0) }
    }

    /// Hands launches over, to run one after another. What is seen for the [`SIGHTS`]th time becomes a graph.
    pub fn submit(&mut self, launches: Vec<Launch>, stream: CUstream) -> Result<(), DriverError> {
        if !self.works || launches.len() < LEAST {
            return one_by_one(&launches, stream);
        }
        self.clock += 1;
        let key = key(&launches);
        if self.chains.len() >= MOST && !self.chains.contains_key(&key) {
            self.forget();
        }
        let seen = self.chains.entry(key).or_default();
        (seen.last, seen.times) = (self.clock, seen.times + 1);
        match &mut seen.chain {
            Some(chain) if chain.is_of(&launches) => {
                if chain.update(&launches).is_ok() {
                    chain.launches = launches;
                    return chain.run(stream);
                }
                seen.chain = None;
                return one_by_one(&launches, stream);
            }
            // Another chain with the same key.
            Some(_) => return one_by_one(&launches, stream),
            None if seen.times < SIGHTS => return one_by_one(&launches, stream),
            None => {}
        }
        match Chain::new(launches, self.early) {
            Ok(chain) => seen.chain.insert(chain).run(stream),
            Err((launches, error)) => {
                tracing::debug!("no graphs: {error:?}");
                self.works = false;
                one_by_one(&launches, stream)
            }
        }
    }

    /// Forgets what was not used for longest.
    fn forget(&mut self) {
        if let Some(oldest) = self.chains.iter().min_by_key(|(_, seen)| seen.last).map(|(key, _)| *key) {
            self.chains.remove(&oldest);
        }
    }

    /// Gives all of them back. The context is current.
    pub fn clear(&mut self) {
        self.chains.clear();
    }
}

fn one_by_one(launches: &[Launch], stream: CUstream) -> Result<(), DriverError> {
    launches.iter().try_for_each(|launch| launch.run(stream))
}

/// A number for the kernels and addresses of a chain.
fn key(launches: &[Launch]) -> u64 {
    let mut key = DefaultHasher::new();
    launches.iter().for_each(|launch| (launch.function, &launch.addresses).hash(&mut key));
    key.finish()
}

/// A graph, ready to run.
struct Chain {
    graph: CUgraph,
    exec: CUgraphExec,
    nodes: Vec<CUgraphNode>,
    /// As the graph has them now.
    launches: Vec<Launch>,
}

impl Chain {
    /// On an error the launches are given back.
    fn new(launches: Vec<Launch>, early: bool) -> Result<Self, (Vec<Launch>, DriverError)> {
        let (graph, exec, nodes) = (ptr::null_mut(), ptr::null_mut(), Vec::with_capacity(launches.len()));
        let mut new = Self { graph, exec, nodes, launches };
        match new.make(early) {
            Ok(()) => Ok(new),
            Err(error) => Err((std::mem::take(&mut new.launches), error)),
        }
    }

    fn make(&mut self, early: bool) -> Result<(), DriverError> {
        let edge = CUgraphEdgeData {
            from_port: EARLY,
            to_port: 0,
            type_: CUgraphDependencyType::CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC as u8,
            reserved: [0; 5],
        };
        // SAFETY: the context is current; what is made here is given back once, when this goes; parameters are copied before a
        // call returns.
        unsafe {
            sys::cuGraphCreate(&mut self.graph, 0).result()?;
            for launch in &self.launches {
                let before = self.nodes.last().copied();
                let waits = before.as_slice();
                let waits = if early { &[] } else { waits };
                let mut node = ptr::null_mut();
                launch.node(|parameters| {
                    sys::cuGraphAddKernelNode_v2(&mut node, self.graph, waits.as_ptr(), waits.len(), parameters)
                        .result()
                })?;
                if let (true, Some(before)) = (early, before) {
                    sys::cuGraphAddDependencies_v2(self.graph, &before, &node, &edge, 1).result()?;
                }
                self.nodes.push(node);
            }
            sys::cuGraphInstantiateWithFlags(&mut self.exec, self.graph, 0).result()
        }
    }

    /// True if it has these kernels and addresses.
    fn is_of(&self, launches: &[Launch]) -> bool {
        let same = |(a, b): (&Launch, &Launch)| a.function == b.function && a.addresses == b.addresses;
        self.launches.len() == launches.len() && self.launches.iter().zip(launches).all(same)
    }

    /// Tells launches what is new. A run that is under way keeps what it was given.
    fn update(&self, launches: &[Launch]) -> Result<(), DriverError> {
        let changed = self.nodes.iter().zip(self.launches.iter().zip(launches));
        for (node, (_, new)) in changed.filter(|(_, (old, new))| old != new) {
            // SAFETY: the node is this graph's; parameters are copied before the call returns.
            new.node(|parameters| unsafe {
                sys::cuGraphExecKernelNodeSetParams_v2(self.exec, *node, parameters).result()
            })?;
        }
        Ok(())
    }

    fn run(&self, stream: CUstream) -> Result<(), DriverError> {
        // SAFETY: made by this context; the memory that its launches name lives until the card is done, as with single launches.
        unsafe { sys::cuGraphLaunch(self.exec, stream).result() }
    }
}

impl Drop for Chain {
    fn drop(&mut self) {
        // SAFETY: made by the context that is current, and given back once; a run under way ends first.
        unsafe {
            if !self.exec.is_null() {
                let _ = sys::cuGraphExecDestroy(self.exec);
            }
            if !self.graph.is_null() {
                let _ = sys::cuGraphDestroy(self.graph);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn launch(function: usize, addresses: &[u64], args: &[u32]) -> Launch {
        Launch {
            function: function as sys::CUfunction,
            args: args.to_vec(),
            addresses: addresses.to_vec(),
            grid: [1; 3],
            threads: 32,
        }
    }

    #[test]
    fn a_chain_is_known_by_its_kernels_and_addresses() {
        let chain = |function, address, word| key(&[launch(1, &[7], &[]), launch(function, &[address, 8], &[word])]);
        assert_eq!(chain(2, 9, 5), chain(2, 9, 6), "arguments may change");
        assert_ne!(chain(2, 9, 5), chain(3, 9, 5));
        assert_ne!(chain(2, 9, 5), chain(2, 10, 5));
        assert_ne!(key(&[launch(1, &[7, 8], &[])]), key(&[launch(1, &[8, 7], &[])]));
    }

    #[test]
    fn room_is_made_for_what_is_new() {
        let mut graphs = Graphs::new(DRIVER, (9, 0));
        for last in 0..MOST as u64 {
            graphs.chains.insert(last, Seen { last: last ^ 1, ..Seen::default() });
        }
        graphs.forget();
        assert_eq!(graphs.chains.len(), MOST - 1);
        assert!(!graphs.chains.contains_key(&1), "the oldest");
        assert!(!Graphs::new(12020, (9, 0)).works && !Graphs::new(13000, (8, 9)).early);
    }
}

//! CUDA graphs of repeated launch sequences.
//!
//! Decoding a token takes several hundred launches. If the launches are submitted one by one, each launch costs several
//! microseconds of CPU time and leaves the GPU idle for a moment. A repeated sequence of launches is therefore recorded
//! as a graph and replayed. Before a replay, only the launches with changed arguments are updated.
//!
//! On Hopper and later, graphs use programmatic dependent launch: a launch may begin before the previous launch has
//! ended, and waits for the previous launch at its `AWAIT` (see `kernels/README.md`).

use super::launch::CudaLaunch;
use cudarc::driver::{
    result::DriverError,
    sys::{self, CUgraph, CUgraphDependencyType, CUgraphEdgeData, CUgraphExec, CUgraphNode, CUstream},
};
use std::{
    collections::HashMap,
    hash::{DefaultHasher, Hash, Hasher},
    ptr,
};

/// Minimum number of launches in a graph. Shorter sequences are submitted launch by launch.
const MIN_LAUNCHES: usize = 4;
/// Number of submissions at which a sequence becomes a graph. The sequences of decoding repeat this often. The
/// sequences of a prefill do not. A prefill's launches are long, so a graph would save less time than its creation
/// takes.
const MIN_REPEATS: u32 = 8;
/// Maximum number of sequences in the cache.
const MAX_SEQUENCES: usize = 128;
/// The first driver version with programmatic dependent launch in graphs: CUDA 12.3.
const MIN_DRIVER: i32 = 12030;
/// Output port of a kernel node for edges that allow programmatic dependent launch.
const PROGRAMMATIC_PORT: u8 = 1;

/// Launch sequences and their graphs, by a hash of kernels and buffer addresses.
pub struct GraphCache {
    entries: HashMap<u64, GraphEntry>,
    clock: u64,
    /// True if the driver is recent enough and no graph creation has failed.
    is_supported: bool,
    /// True if graphs use programmatic dependent launch: consecutive launches may overlap.
    overlaps: bool,
}

/// A launch sequence that was submitted at least once.
#[derive(Default)]
struct GraphEntry {
    /// [`GraphCache::clock`] at the last submission.
    last_used: u64,
    /// Number of submissions so far.
    count: u32,
    graph: Option<LaunchGraph>,
}

impl GraphCache {
    /// `driver` is the driver's version number, `capability` the GPU's compute capability.
    pub fn new(driver: i32, capability: (i32, i32)) -> Self {
        Self { entries: HashMap::new(), clock: 0, is_supported: driver >= MIN_DRIVER, overlaps: capability >= (9, 0) }
    }

    /// Submits a sequence of launches, as a graph from its [`MIN_REPEATS`]th submission on.
    pub fn submit(&mut self, launches: Vec<CudaLaunch>, stream: CUstream) -> Result<(), DriverError> {
        if !self.is_supported || launches.len() < MIN_LAUNCHES {
            return run_each(&launches, stream);
        }
        self.clock += 1;
        let key = key(&launches);
        if self.entries.len() >= MAX_SEQUENCES && !self.entries.contains_key(&key) {
            self.evict_oldest();
        }
        let entry = self.entries.entry(key).or_default();
        (entry.last_used, entry.count) = (self.clock, entry.count + 1);
        match &mut entry.graph {
            Some(graph) if graph.matches(&launches) => {
                if graph.update(&launches).is_ok() {
                    graph.launches = launches;
                    return graph.run(stream);
                }
                entry.graph = None;
                return run_each(&launches, stream);
            }
            // Two sequences have the same hash, and the graph belongs to the other sequence.
            Some(_) => return run_each(&launches, stream),
            None if entry.count < MIN_REPEATS => return run_each(&launches, stream),
            None => {}
        }
        match LaunchGraph::new(launches, self.overlaps) {
            Ok(graph) => entry.graph.insert(graph).run(stream),
            Err((launches, error)) => {
                tracing::debug!("cannot create a CUDA graph ({error:?}): launches are submitted one by one");
                self.is_supported = false;
                run_each(&launches, stream)
            }
        }
    }

    /// Removes the least recently used sequence.
    fn evict_oldest(&mut self) {
        if let Some(oldest) = self.entries.iter().min_by_key(|(_, entry)| entry.last_used).map(|(key, _)| *key) {
            self.entries.remove(&oldest);
        }
    }

    /// Destroys all graphs. The context must be current.
    pub fn clear(&mut self) {
        self.entries.clear();
    }
}

fn run_each(launches: &[CudaLaunch], stream: CUstream) -> Result<(), DriverError> {
    launches.iter().try_for_each(|launch| launch.run(stream))
}

/// A hash of the kernels and buffer addresses of a sequence.
fn key(launches: &[CudaLaunch]) -> u64 {
    let mut key = DefaultHasher::new();
    launches.iter().for_each(|launch| (launch.function, &launch.addresses).hash(&mut key));
    key.finish()
}

/// An instantiated CUDA graph.
struct LaunchGraph {
    graph: CUgraph,
    exec: CUgraphExec,
    nodes: Vec<CUgraphNode>,
    /// The launches of the graph, with the arguments that the graph currently has.
    launches: Vec<CudaLaunch>,
}

impl LaunchGraph {
    /// Creates a graph. On an error, returns the launches together with the error.
    fn new(launches: Vec<CudaLaunch>, overlaps: bool) -> Result<Self, (Vec<CudaLaunch>, DriverError)> {
        let graph = ptr::null_mut();
        let exec = ptr::null_mut();
        let nodes = Vec::with_capacity(launches.len());
        let mut new = Self { graph, exec, nodes, launches };
        match new.create(overlaps) {
            Ok(()) => Ok(new),
            Err(error) => Err((std::mem::take(&mut new.launches), error)),
        }
    }

    fn create(&mut self, overlaps: bool) -> Result<(), DriverError> {
        let edge = CUgraphEdgeData {
            from_port: PROGRAMMATIC_PORT,
            to_port: 0,
            type_: CUgraphDependencyType::CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC as u8,
            reserved: [0; 5],
        };
        // SAFETY: the context is current. `drop` destroys graph and executable once. The driver copies the parameters
        // before each call returns.
        unsafe {
            sys::cuGraphCreate(&mut self.graph, 0).result()?;
            for launch in &self.launches {
                let before = self.nodes.last().copied();
                let dependencies = before.as_slice();
                let dependencies = if overlaps { &[] } else { dependencies };
                let mut node = ptr::null_mut();
                launch.with_node(|parameters| {
                    sys::cuGraphAddKernelNode_v2(
                        &mut node,
                        self.graph,
                        dependencies.as_ptr(),
                        dependencies.len(),
                        parameters,
                    )
                    .result()
                })?;
                if let (true, Some(before)) = (overlaps, before) {
                    sys::cuGraphAddDependencies_v2(self.graph, &before, &node, &edge, 1).result()?;
                }
                self.nodes.push(node);
            }
            sys::cuGraphInstantiateWithFlags(&mut self.exec, self.graph, 0).result()
        }
    }

    /// True if the graph has the same kernels and addresses as `launches`.
    fn matches(&self, launches: &[CudaLaunch]) -> bool {
        let same = |(a, b): (&CudaLaunch, &CudaLaunch)| a.function == b.function && a.addresses == b.addresses;
        self.launches.len() == launches.len() && self.launches.iter().zip(launches).all(same)
    }

    /// Updates the nodes whose arguments have changed. A run in progress is not affected.
    fn update(&self, launches: &[CudaLaunch]) -> Result<(), DriverError> {
        let changed = self.nodes.iter().zip(self.launches.iter().zip(launches));
        for (node, (_, new)) in changed.filter(|(_, (old, new))| old != new) {
            // SAFETY: the node belongs to this graph. The driver copies the parameters before the call returns.
            new.with_node(|parameters| unsafe {
                sys::cuGraphExecKernelNodeSetParams_v2(self.exec, *node, parameters).result()
            })?;
        }
        Ok(())
    }

    fn run(&self, stream: CUstream) -> Result<(), DriverError> {
        // SAFETY: this context created the graph. The queue frees a buffer only after the GPU has completed the work
        // that uses it.
        unsafe { sys::cuGraphLaunch(self.exec, stream).result() }
    }
}

impl Drop for LaunchGraph {
    fn drop(&mut self) {
        // SAFETY: the current context created graph and executable, and each is destroyed once. CUDA lets a run in
        // progress end first.
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

    fn launch(function: usize, addresses: &[u64], args: &[u32]) -> CudaLaunch {
        CudaLaunch {
            function: function as sys::CUfunction,
            args: args.to_vec(),
            addresses: addresses.to_vec(),
            grid: [1; 3],
            threads: 32,
        }
    }

    #[test]
    fn key_depends_on_kernels_and_addresses_only() {
        let key_of = |function, address, word| key(&[launch(1, &[7], &[]), launch(function, &[address, 8], &[word])]);
        assert_eq!(key_of(2, 9, 5), key_of(2, 9, 6), "arguments may change");
        assert_ne!(key_of(2, 9, 5), key_of(3, 9, 5));
        assert_ne!(key_of(2, 9, 5), key_of(2, 10, 5));
        assert_ne!(key(&[launch(1, &[7, 8], &[])]), key(&[launch(1, &[8, 7], &[])]));
    }

    #[test]
    fn least_recently_used_sequence_is_evicted() {
        let mut graphs = GraphCache::new(MIN_DRIVER, (9, 0));
        for last in 0..MAX_SEQUENCES as u64 {
            graphs.entries.insert(last, GraphEntry { last_used: last ^ 1, ..GraphEntry::default() });
        }
        graphs.evict_oldest();
        assert_eq!(graphs.entries.len(), MAX_SEQUENCES - 1);
        assert!(!graphs.entries.contains_key(&1), "the oldest");
        assert!(!GraphCache::new(12020, (9, 0)).is_supported && !GraphCache::new(13000, (8, 9)).overlaps);
    }
}

//! A launch with its addresses, as the driver takes it.

use cudarc::driver::{
    result::{self, DriverError},
    sys::{CUDA_KERNEL_NODE_PARAMS, CUdeviceptr, CUfunction, CUstream},
};
use std::{ffi::c_void, ptr};

/// Words of arguments, and buffers, that a launch has at most.
pub const MOST_ARGUMENTS: usize = 128;
pub const MOST_BUFFERS: usize = 31;

#[derive(Debug, Clone, PartialEq)]
pub struct Launch {
    pub function: CUfunction,
    /// At most [`MOST_ARGUMENTS`].
    pub args: Vec<u32>,
    /// At most [`MOST_BUFFERS`].
    pub addresses: Vec<CUdeviceptr>,
    pub grid: [u32; 3],
    pub threads: u32,
}

impl Launch {
    /// Calls `f` with a pointer to each of the kernel's parameters.
    fn parameters<T>(&self, f: impl FnOnce(&mut [*mut c_void]) -> T) -> T {
        // The driver copies as much as the kernel's parameters take: past the words there must be something to copy.
        let mut words = [0u32; MOST_ARGUMENTS];
        words[..self.args.len()].copy_from_slice(&self.args);
        let mut addresses: [CUdeviceptr; MOST_BUFFERS] = [0; MOST_BUFFERS];
        addresses[..self.addresses.len()].copy_from_slice(&self.addresses);
        let mut parameters = [ptr::null_mut::<c_void>(); MOST_BUFFERS + 1];
        parameters[0] = words.as_mut_ptr().cast();
        for (parameter, address) in parameters[1..].iter_mut().zip(&mut addresses) {
            *parameter = ptr::from_mut(address).cast();
        }
        f(&mut parameters)
    }

    /// Encodes it.
    pub fn run(&self, stream: CUstream) -> Result<(), DriverError> {
        let [width, height, depth] = self.grid;
        // SAFETY: the kernel's parameters are copied before the call returns; the memory lives until the card is done, since the
        // queue frees none before.
        self.parameters(|parameters| unsafe {
            let (grid, block) = ((width, height, depth), (self.threads, 1, 1));
            result::launch_kernel(self.function, grid, block, 0, stream, parameters)
        })
    }

    /// Calls `f` with what a graph is told of it.
    pub fn node<T>(&self, f: impl FnOnce(&CUDA_KERNEL_NODE_PARAMS) -> T) -> T {
        let [width, height, depth] = self.grid;
        self.parameters(|parameters| {
            f(&CUDA_KERNEL_NODE_PARAMS {
                func: self.function,
                gridDimX: width,
                gridDimY: height,
                gridDimZ: depth,
                blockDimX: self.threads,
                blockDimY: 1,
                blockDimZ: 1,
                sharedMemBytes: 0,
                kernelParams: parameters.as_mut_ptr(),
                extra: ptr::null_mut(),
                kern: ptr::null_mut(),
                ctx: ptr::null_mut(),
            })
        })
    }
}

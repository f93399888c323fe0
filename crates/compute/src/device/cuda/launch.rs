//! [`CudaLaunch`]: a kernel launch with resolved function and buffer addresses.

use cudarc::driver::{
    result::{self, DriverError},
    sys::{CUDA_KERNEL_NODE_PARAMS, CUdeviceptr, CUfunction, CUstream},
};
use std::{ffi::c_void, ptr};

/// Maximum number of 32-bit argument words per launch.
pub const MAX_ARGUMENTS: usize = 128;
/// Maximum number of buffers per launch.
pub const MAX_BUFFERS: usize = 31;

#[derive(Debug, Clone, PartialEq)]
pub struct CudaLaunch {
    pub function: CUfunction,
    /// The argument words, at most [`MAX_ARGUMENTS`].
    pub args: Vec<u32>,
    /// The addresses of the buffers, at most [`MAX_BUFFERS`].
    pub addresses: Vec<CUdeviceptr>,
    pub grid: [u32; 3],
    pub threads: u32,
}

impl CudaLaunch {
    /// Calls `f` with a pointer to each kernel parameter.
    fn with_parameters<T>(&self, f: impl FnOnce(&mut [*mut c_void]) -> T) -> T {
        // The driver copies as many bytes as the kernel declares, which may be more than `args` has. `words` is
        // therefore padded.
        let mut words = [0u32; MAX_ARGUMENTS];
        words[..self.args.len()].copy_from_slice(&self.args);
        let mut addresses: [CUdeviceptr; MAX_BUFFERS] = [0; MAX_BUFFERS];
        addresses[..self.addresses.len()].copy_from_slice(&self.addresses);
        let mut parameters = [ptr::null_mut::<c_void>(); MAX_BUFFERS + 1];
        parameters[0] = words.as_mut_ptr().cast();
        for (parameter, address) in parameters[1..].iter_mut().zip(&mut addresses) {
            *parameter = ptr::from_mut(address).cast();
        }
        f(&mut parameters)
    }

    /// Submits the launch to a stream.
    pub fn run(&self, stream: CUstream) -> Result<(), DriverError> {
        let [width, height, depth] = self.grid;
        // SAFETY: the driver copies the parameters before the call returns. The queue frees a buffer only after the GPU
        // has completed all work that uses it.
        self.with_parameters(|parameters| unsafe {
            let grid = (width, height, depth);
            let block = (self.threads, 1, 1);
            result::launch_kernel(self.function, grid, block, 0, stream, parameters)
        })
    }

    /// Calls `f` with the parameters of a graph node.
    pub fn with_node<T>(&self, f: impl FnOnce(&CUDA_KERNEL_NODE_PARAMS) -> T) -> T {
        let [width, height, depth] = self.grid;
        self.with_parameters(|parameters| {
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

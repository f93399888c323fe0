//! Compiles all Metal kernels and creates their pipelines when the first kernel is needed.
//!
//! Moestro caches no compiled code between runs, but macOS does. Metal stores the GPU code of each pipeline in the
//! user's cache directory (WWDC 2022, session 10102). The system may purge this cache. Apple documents no cache for the
//! step from source to library, so each start may repeat that step. `moestro doctor` prints the time of both steps, so
//! a second run shows which step was cached. Skipping the first step would need Xcode's offline compiler. An
//! `MTLBinaryArchive` would only save the second step, which macOS already caches.

use crate::device::{
    DeviceError,
    kernels::{self, CompiledKernels, FileKernels},
    metal::exception::catch_exception,
};
use candle_metal_kernels::metal::Device;
use objc2::{
    rc::{Retained, autoreleasepool},
    runtime::ProtocolObject,
};
use objc2_foundation::{NSError, NSString};
use objc2_metal::{MTLCompileOptions, MTLComputePipelineState, MTLDevice, MTLLibrary};
use std::cell::OnceCell;

type Pipeline = Retained<ProtocolObject<dyn MTLComputePipelineState>>;

/// The pipelines of all kernels. Command buffers do not retain pipelines, so the library keeps every pipeline that it
/// has lent.
pub struct MetalLibrary {
    device: Device,
    /// Empty until the sources are compiled.
    compiled: OnceCell<CompiledKernels<Pipeline>>,
    /// The kernel that fails on purpose.
    fault: Option<Pipeline>,
    /// True if attention is compiled with the precise `exp`.
    has_precise_exp: bool,
}

impl MetalLibrary {
    pub fn new(device: &Device) -> Self {
        Self { device: device.clone(), compiled: OnceCell::new(), fault: None, has_precise_exp: false }
    }

    /// Compiles attention with the precise `exp`. Must be called before the first kernel is needed.
    pub fn set_precise_exp(&mut self) {
        self.has_precise_exp = true;
    }

    /// Compiles all files on the first call.
    fn compiled(&self) -> &CompiledKernels<Pipeline> {
        self.compiled.get_or_init(|| {
            let device = &self.device;
            let has_precise_exp = self.has_precise_exp;
            // Each file is compiled on another thread, which must not end with an Objective-C exception.
            kernels::compile(false, |_, text, tiles| {
                let source = kernels::metal_source(text, tiles);
                let source = if has_precise_exp { kernels::with_precise_exp(&source) } else { source };
                let compiled = catch_exception(|| autoreleasepool(|_| compile_file(device, &source)));
                compiled.unwrap_or_else(|thrown| Err(thrown.to_string()))
            })
        })
    }

    /// True if the kernels that need matrix units have compiled.
    pub fn has_tiles(&self) -> bool {
        self.compiled().has_tiles
    }

    /// Creates every pipeline. Returns the name of each kernel, and of each file that did not compile, with the error
    /// if there is one.
    pub fn all(&self) -> Vec<(String, Option<DeviceError>)> {
        self.compiled().outcomes()
    }

    pub fn pipeline(&self, name: &str) -> Result<&Pipeline, DeviceError> {
        self.compiled().pipeline(name)
    }

    /// A pipeline that writes to an unmapped address, for `moestro doctor`.
    pub fn fault_pipeline(&mut self) -> Result<&Pipeline, DeviceError> {
        let pipeline = match self.fault.take() {
            Some(pipeline) => pipeline,
            None => {
                let source = NSString::from_str(kernels::METAL_FAULT);
                let library = self.device.as_ref().newLibraryWithSource_options_error(&source, None);
                let library = library.map_err(|error| DeviceError::Failed(message(&error)))?;
                create(&self.device, &library, &NSString::from_str("fault")).map_err(DeviceError::Failed)?
            }
        };
        Ok(self.fault.insert(pipeline))
    }

    /// Leaks all pipelines, because a command buffer that never ended may still use them.
    pub fn leak_pipelines(&mut self) {
        std::mem::forget((self.compiled.take(), self.fault.take()));
    }
}

/// Compiles the source of a file and creates its pipelines.
fn compile_file(device: &Device, source: &str) -> Result<FileKernels<Pipeline>, String> {
    let options = MTLCompileOptions::new();
    // With fast math, a row's result would depend on which kernel computed it, and differ from the CPU's result.
    // `setFastMathEnabled` is deprecated, but its replacement `mathMode` needs macOS 15.
    #[allow(deprecated)]
    options.setFastMathEnabled(false);
    let source = NSString::from_str(source);
    let library = device.as_ref().newLibraryWithSource_options_error(&source, Some(&options));
    let library = library.map_err(|error| format!("Apple's compiler rejects it:\n{}", message(&error)))?;
    let names = library.functionNames();
    Ok(names.iter().map(|name| (name.to_string(), create(device, &library, &name))).collect())
}

/// Creates the pipeline of a function.
fn create(device: &Device, library: &ProtocolObject<dyn MTLLibrary>, name: &NSString) -> Result<Pipeline, String> {
    let Some(function) = library.newFunctionWithName(name) else {
        return Err("the function is missing from its library".into());
    };
    let pipeline = device.as_ref().newComputePipelineStateWithFunction_error(&function);
    pipeline.map_err(|error| message(&error))
}

fn message(error: &NSError) -> String {
    error.localizedDescription().to_string()
}

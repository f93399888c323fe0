//! Compiles all Metal kernels when the first kernel is needed, and creates each pipeline on first use.
//!
//! Moestro caches no compiled code between runs, but macOS does. Metal stores the GPU code of each pipeline in the
//! user's cache directory (WWDC 2022, session 10102). The system may purge this cache. Apple documents no cache for the
//! step from source to library, so each start may repeat that step. `moestro doctor` prints the time of both steps, so
//! a second run shows which step was cached. Skipping the first step would need Xcode's offline compiler. An
//! `MTLBinaryArchive` would only save the second step, which macOS already caches.

use crate::device::{DeviceError, kernels};
use candle_metal_kernels::metal::Device;
use objc2::{rc::Retained, runtime::ProtocolObject};
use objc2_foundation::{NSError, NSString};
use objc2_metal::{MTLCompileOptions, MTLComputePipelineState, MTLDevice, MTLLibrary};
use std::{cell::OnceCell, collections::BTreeMap};

type Pipeline = Retained<ProtocolObject<dyn MTLComputePipelineState>>;

pub struct MetalLibrary {
    device: Device,
    /// Empty until the sources are compiled.
    compiled: OnceCell<CompiledFunctions>,
    pipelines: BTreeMap<String, Pipeline>,
}

struct CompiledFunctions {
    /// The Metal library that contains each function, by function name.
    libraries: BTreeMap<String, Retained<ProtocolObject<dyn MTLLibrary>>>,
    /// Files that did not compile, each with the compiler's log.
    refused: Vec<(String, String)>,
    /// True if the kernels that need matrix units have compiled.
    has_tiles: bool,
}

impl MetalLibrary {
    pub fn new(device: &Device) -> Self {
        Self { device: device.clone(), compiled: OnceCell::new(), pipelines: BTreeMap::new() }
    }

    /// Compiles all files on the first call.
    fn compiled(&self) -> &CompiledFunctions {
        self.compiled.get_or_init(|| {
            let options = MTLCompileOptions::new();
            // With fast math, a row's result would depend on which kernel computed it, and differ from the CPU's
            // result. `setFastMathEnabled` is deprecated, but its replacement `mathMode` needs macOS 15.
            #[allow(deprecated)]
            options.setFastMathEnabled(false);
            let compiled = kernels::compile(|_, text, tiles| {
                let source = NSString::from_str(&kernels::metal_source(text, tiles));
                let library = self.device.as_ref().newLibraryWithSource_options_error(&source, Some(&options));
                library.map_err(|error| error.localizedDescription().to_string())
            });
            let mut libraries = BTreeMap::new();
            for library in compiled.libraries {
                for function in library.functionNames() {
                    libraries.insert(function.to_string(), library.clone());
                }
            }
            CompiledFunctions { libraries, refused: compiled.refused, has_tiles: compiled.has_tiles }
        })
    }

    /// True if the kernels that need matrix units have compiled.
    pub fn has_tiles(&self) -> bool {
        self.compiled().has_tiles
    }

    /// Creates every pipeline. Returns the name of each kernel, and of each file that did not compile, with the error
    /// if there is one.
    pub fn all(&mut self) -> Vec<(String, Option<DeviceError>)> {
        let names: Vec<String> = self.compiled().libraries.keys().cloned().collect();
        let refused = self.compiled().refused.iter();
        let mut all: Vec<_> = refused
            .map(|(file, log)| (file.clone(), Some(DeviceError(format!("Apple's compiler rejects it:\n{log}")))))
            .collect();
        all.extend(names.into_iter().map(|name| {
            let error = self.pipeline(&name).err();
            (name, error)
        }));
        all
    }

    /// A pipeline that writes to an unmapped address, for `moestro doctor`.
    pub fn fault_pipeline(&mut self) -> Result<Pipeline, DeviceError> {
        let refused = |error: Retained<NSError>| DeviceError(error.localizedDescription().to_string());
        let library =
            self.device.as_ref().newLibraryWithSource_options_error(&NSString::from_str(kernels::METAL_FAULT), None);
        let Some(function) = library.map_err(refused)?.newFunctionWithName(&NSString::from_str("fault")) else {
            return Err(DeviceError("the fault kernel is missing from its library".into()));
        };
        self.device.as_ref().newComputePipelineStateWithFunction_error(&function).map_err(refused)
    }

    /// Leaks all pipelines, because a command buffer that never ended may still use them.
    pub fn leak_pipelines(&mut self) {
        std::mem::forget(std::mem::take(&mut self.pipelines));
    }

    pub fn pipeline(&mut self, name: &str) -> Result<Pipeline, DeviceError> {
        if let Some(pipeline) = self.pipelines.get(name) {
            return Ok(pipeline.clone());
        }
        let library = self.compiled().libraries.get(name).cloned();
        let Some(function) = library.and_then(|library| library.newFunctionWithName(&NSString::from_str(name))) else {
            let rejected: Vec<&str> = self.compiled().refused.iter().map(|(file, _)| file.as_str()).collect();
            let rejected = rejected.join(", ");
            return Err(DeviceError(format!("there is no kernel {name}; files that did not compile: [{rejected}]")));
        };
        let pipeline = self.device.as_ref().newComputePipelineStateWithFunction_error(&function);
        let pipeline =
            pipeline.map_err(|error| DeviceError(format!("kernel {name}: {}", error.localizedDescription())))?;
        self.pipelines.insert(name.to_string(), pipeline.clone());
        Ok(pipeline)
    }
}

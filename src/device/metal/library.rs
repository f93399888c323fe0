//! Compiles the kernels when the first one is needed, a file at a time, and makes pipelines as they are first used.
//!
//! Nothing of ours is kept between runs; macOS keeps some. Apple says of pipelines that Metal stores the GPU's code in a cache on disk
//! as they are made (WWDC 2022, session 10102); it lies in the user's cache directory and may be purged at any time. Of the step
//! before, from source to library, Apple promises nothing, so each start may have to pay for it: `moestro doctor` prints
//! how long all of it took, and a second run shows what was kept. Nothing of ours could save that step without Xcode's tools,
//! and an `MTLBinaryArchive` would save only what macOS saves already.

use crate::device::{DeviceError, kernels};
use candle_metal_kernels::metal::Device;
use objc2::{rc::Retained, runtime::ProtocolObject};
use objc2_foundation::{NSError, NSString};
use objc2_metal::{MTLCompileOptions, MTLComputePipelineState, MTLDevice, MTLLibrary};
use std::{cell::OnceCell, collections::BTreeMap};

type Pipeline = Retained<ProtocolObject<dyn MTLComputePipelineState>>;

/// A page that no process has: the second one of all addresses. The argument keeps a compiler from knowing so.
const FAULT: &str = "#include <metal_stdlib>
kernel void fault(constant uint& zero [[buffer(0)]]) {
    *(volatile device uint*)(16384ul + zero) = 1;
}";

pub struct Library {
    device: Device,
    /// Empty before the sources are compiled.
    compiled: OnceCell<Functions>,
    pipelines: BTreeMap<String, Pipeline>,
}

struct Functions {
    /// The library that each function is in.
    libraries: BTreeMap<String, Retained<ProtocolObject<dyn MTLLibrary>>>,
    /// Files that did not compile, each with the compiler's log.
    refused: Vec<(String, String)>,
    tiles: bool,
}

impl Library {
    pub fn new(device: &Device) -> Self {
        Self { device: device.clone(), compiled: OnceCell::new(), pipelines: BTreeMap::new() }
    }

    /// Compiles all files, once.
    fn compiled(&self) -> &Functions {
        self.compiled.get_or_init(|| {
            let options = MTLCompileOptions::new();
            // A row's bytes must not depend on which of two kernels computed it; and results are compared with the CPU's.
            // The newer `mathMode` does not exist before macOS 15.
            #[allow(deprecated)]
            options.setFastMathEnabled(false);
            let compiled = kernels::compile(|_, text, tiles| {
                let source = NSString::from_str(&kernels::metal(text, tiles));
                let library = self.device.as_ref().newLibraryWithSource_options_error(&source, Some(&options));
                library.map_err(|error| error.localizedDescription().to_string())
            });
            let mut libraries = BTreeMap::new();
            for library in compiled.libraries {
                for function in library.functionNames() {
                    libraries.insert(function.to_string(), library.clone());
                }
            }
            Functions { libraries, refused: compiled.refused, tiles: compiled.tiles }
        })
    }

    /// True if the kernels that need matrix units have compiled.
    pub fn has_tiles(&self) -> bool {
        self.compiled().tiles
    }

    /// Makes every pipeline: kernels, and files that did not compile, each with what is wrong with it.
    pub fn all(&mut self) -> Vec<(String, Option<DeviceError>)> {
        let names: Vec<String> = self.compiled().libraries.keys().cloned().collect();
        let refused = self.compiled().refused.iter();
        let mut all: Vec<_> = refused
            .map(|(file, log)| (file.clone(), Some(DeviceError(format!("Apple's compiler refuses it:\n{log}")))))
            .collect();
        all.extend(names.into_iter().map(|name| {
            let error = self.pipeline(&name).err();
            (name, error)
        }));
        all
    }

    /// A kernel that writes where nobody has memory, for `doctor`.
    pub fn fault(&mut self) -> Result<Pipeline, DeviceError> {
        let refused = |error: Retained<NSError>| DeviceError(error.localizedDescription().to_string());
        let library = self.device.as_ref().newLibraryWithSource_options_error(&NSString::from_str(FAULT), None);
        let Some(function) = library.map_err(refused)?.newFunctionWithName(&NSString::from_str("fault")) else {
            return Err(DeviceError("the kernel that fails is missing".into()));
        };
        self.device.as_ref().newComputePipelineStateWithFunction_error(&function).map_err(refused)
    }

    pub fn pipeline(&mut self, name: &str) -> Result<Pipeline, DeviceError> {
        if let Some(pipeline) = self.pipelines.get(name) {
            return Ok(pipeline.clone());
        }
        let library = self.compiled().libraries.get(name).cloned();
        let Some(function) = library.and_then(|library| library.newFunctionWithName(&NSString::from_str(name))) else {
            let files: Vec<&str> = self.compiled().refused.iter().map(|(file, _)| file.as_str()).collect();
            let files =
                if files.is_empty() { "every file".into() } else { format!("all files but {}", files.join(", ")) };
            return Err(DeviceError(format!("there is no kernel {name}, and Apple's compiler took {files}")));
        };
        let pipeline = self.device.as_ref().newComputePipelineStateWithFunction_error(&function);
        let pipeline =
            pipeline.map_err(|error| DeviceError(format!("kernel {name}: {}", error.localizedDescription())))?;
        self.pipelines.insert(name.to_string(), pipeline.clone());
        Ok(pipeline)
    }
}

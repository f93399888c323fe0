//! Compiles the kernels when the first one is needed, a file at a time, and makes pipelines as they are first used.
//!
//! What is kept between runs is macOS's, not ours. Apple says of pipelines that Metal stores the GPU's code in a cache on disk
//! as they are made (WWDC 2022, session 10102); it lies in the user's cache directory and may be purged at any time. Of the step
//! before, from source to library, Apple promises nothing, so each start may have to pay for it: `moestro doctor` prints
//! how long all of it took, and a second run shows what was kept. Nothing of ours could save that step without Xcode's tools,
//! and an `MTLBinaryArchive` would save only what macOS saves already.

use crate::device::{DeviceError, kernels};
use candle_metal_kernels::metal::Device;
use objc2::{rc::Retained, runtime::ProtocolObject};
use objc2_foundation::NSString;
use objc2_metal::{MTLCompileOptions, MTLComputePipelineState, MTLDevice, MTLLibrary};
use std::collections::BTreeMap;

type Pipeline = Retained<ProtocolObject<dyn MTLComputePipelineState>>;

pub struct Library {
    device: Device,
    /// The library that each function is in; `None` before the sources are compiled.
    functions: Option<BTreeMap<String, Retained<ProtocolObject<dyn MTLLibrary>>>>,
    /// Files that did not compile, each with the compiler's log.
    refused: Vec<(String, String)>,
    pipelines: BTreeMap<String, Pipeline>,
}

impl Library {
    pub fn new(device: &Device) -> Self {
        Self { device: device.clone(), functions: None, refused: Vec::new(), pipelines: BTreeMap::new() }
    }

    /// Compiles all files, once.
    fn functions(&mut self) -> &BTreeMap<String, Retained<ProtocolObject<dyn MTLLibrary>>> {
        let Self { device, functions, refused, .. } = self;
        functions.get_or_insert_with(|| {
            let options = MTLCompileOptions::new();
            // A row's bytes must not depend on which of two kernels computed it; and results are compared with the CPU's.
            // The newer `mathMode` does not exist before macOS 15.
            #[allow(deprecated)]
            options.setFastMathEnabled(false);
            let mut functions = BTreeMap::new();
            for (name, text) in kernels::FILES {
                let source = NSString::from_str(&kernels::metal(text));
                match device.as_ref().newLibraryWithSource_options_error(&source, Some(&options)) {
                    Ok(library) => {
                        for function in library.functionNames() {
                            functions.insert(function.to_string(), library.clone());
                        }
                    }
                    Err(error) => {
                        refused.push((format!("kernels/{name}.metal"), error.localizedDescription().to_string()));
                    }
                }
            }
            functions
        })
    }

    /// Makes every pipeline: kernels, and files that did not compile, each with what is wrong with it.
    pub fn all(&mut self) -> Vec<(String, Option<DeviceError>)> {
        let names: Vec<String> = self.functions().keys().cloned().collect();
        let refused = self.refused.iter();
        let mut all: Vec<_> = refused
            .map(|(file, log)| (file.clone(), Some(DeviceError(format!("Apple's compiler refuses it:\n{log}")))))
            .collect();
        all.extend(names.into_iter().map(|name| {
            let error = self.pipeline(&name).err();
            (name, error)
        }));
        all
    }

    pub fn pipeline(&mut self, name: &str) -> Result<Pipeline, DeviceError> {
        if let Some(pipeline) = self.pipelines.get(name) {
            return Ok(pipeline.clone());
        }
        let library = self.functions().get(name).cloned();
        let Some(function) = library.and_then(|library| library.newFunctionWithName(&NSString::from_str(name))) else {
            let files: Vec<&str> = self.refused.iter().map(|(file, _)| file.as_str()).collect();
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

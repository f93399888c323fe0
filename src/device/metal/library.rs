//! Compiles the kernels at start, a file at a time, and makes pipelines as they are first used. There is no cache of our own:
//! macOS keeps what its Metal compiler made of a source, and of a pipeline, between runs of a program, and looks it up when
//! the same source is compiled again; `moestro doctor` prints how long both steps took. (An `MTLBinaryArchive` would save the
//! second step only, and would have to be thrown away with every update of macOS.)

use crate::device::{GpuError, kernels};
use candle_metal_kernels::metal::Device;
use objc2::{rc::Retained, runtime::ProtocolObject};
use objc2_foundation::NSString;
use objc2_metal::{MTLCompileOptions, MTLComputePipelineState, MTLDevice, MTLLibrary};
use std::collections::BTreeMap;

type Pipeline = Retained<ProtocolObject<dyn MTLComputePipelineState>>;

pub struct Library {
    device: Device,
    /// The library that each function is in.
    functions: BTreeMap<String, Retained<ProtocolObject<dyn MTLLibrary>>>,
    /// Files that did not compile, each with the compiler's log.
    refused: Vec<(String, GpuError)>,
    pipelines: BTreeMap<String, Pipeline>,
}

impl Library {
    /// Compiles all files.
    pub fn new(device: &Device) -> Self {
        let options = MTLCompileOptions::new();
        // A row's bytes must not depend on which of two kernels computed it; and results are compared with the CPU's. The
        // newer `mathMode` does not exist before macOS 15.
        #[allow(deprecated)]
        options.setFastMathEnabled(false);
        let (mut functions, mut refused) = (BTreeMap::new(), Vec::new());
        for (name, text) in kernels::FILES {
            let source = NSString::from_str(&kernels::metal(text));
            match device.as_ref().newLibraryWithSource_options_error(&source, Some(&options)) {
                Ok(library) => {
                    for function in library.functionNames() {
                        functions.insert(function.to_string(), library.clone());
                    }
                }
                Err(error) => {
                    let log = error.localizedDescription();
                    refused.push((
                        format!("kernels/{name}.metal"),
                        GpuError(format!("Apple's compiler refuses it:\n{log}")),
                    ));
                }
            }
        }
        Self { device: device.clone(), functions, refused, pipelines: BTreeMap::new() }
    }

    /// Makes every pipeline: kernels, and files that did not compile, each with what is wrong with it.
    pub fn all(&mut self) -> Vec<(String, Option<GpuError>)> {
        let names: Vec<String> = self.functions.keys().cloned().collect();
        let mut all: Vec<_> =
            self.refused.iter().map(|(file, log)| (file.clone(), Some(GpuError(log.0.clone())))).collect();
        all.extend(names.into_iter().map(|name| {
            let error = self.pipeline(&name).err();
            (name, error)
        }));
        all
    }

    pub fn pipeline(&mut self, name: &str) -> Result<Pipeline, GpuError> {
        if let Some(pipeline) = self.pipelines.get(name) {
            return Ok(pipeline.clone());
        }
        let function = self.functions.get(name).and_then(|lib| lib.newFunctionWithName(&NSString::from_str(name)));
        let Some(function) = function else {
            let files: Vec<&str> = self.refused.iter().map(|(file, _)| file.as_str()).collect();
            return Err(GpuError(format!("there is no kernel {name}; not compiled: {files:?}")));
        };
        let pipeline = self.device.as_ref().newComputePipelineStateWithFunction_error(&function);
        let pipeline =
            pipeline.map_err(|error| GpuError(format!("kernel {name}: {}", error.localizedDescription())))?;
        self.pipelines.insert(name.to_string(), pipeline.clone());
        Ok(pipeline)
    }
}

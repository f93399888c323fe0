//! Compiles the kernels at start, a file at a time, and makes pipelines as they are first used. macOS keeps what it has
//! compiled between runs.

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
    pipelines: BTreeMap<String, Pipeline>,
}

impl Library {
    /// Compiles all files. The error is the compiler's log.
    pub fn new(device: &Device) -> Result<Self, GpuError> {
        let options = MTLCompileOptions::new();
        // A row's bytes must not depend on which of two kernels computed it; and results are compared with the CPU's. The
        // newer `mathMode` does not exist before macOS 15.
        #[allow(deprecated)]
        options.setFastMathEnabled(false);
        let mut functions = BTreeMap::new();
        for (name, text) in kernels::FILES {
            let source = NSString::from_str(&kernels::metal(text));
            let library = device.as_ref().newLibraryWithSource_options_error(&source, Some(&options));
            let library = library.map_err(|error| {
                GpuError(format!("Apple's compiler refuses kernels/{name}.metal:\n{}", error.localizedDescription()))
            })?;
            for function in library.functionNames() {
                functions.insert(function.to_string(), library.clone());
            }
        }
        Ok(Self { device: device.clone(), functions, pipelines: BTreeMap::new() })
    }

    pub fn names(&self) -> Vec<String> {
        self.functions.keys().cloned().collect()
    }

    pub fn pipeline(&mut self, name: &str) -> Result<Pipeline, GpuError> {
        if let Some(pipeline) = self.pipelines.get(name) {
            return Ok(pipeline.clone());
        }
        let function = self.functions.get(name).and_then(|lib| lib.newFunctionWithName(&NSString::from_str(name)));
        let Some(function) = function else { return Err(GpuError(format!("there is no kernel {name}"))) };
        let pipeline = self.device.as_ref().newComputePipelineStateWithFunction_error(&function);
        let pipeline =
            pipeline.map_err(|error| GpuError(format!("kernel {name}: {}", error.localizedDescription())))?;
        self.pipelines.insert(name.to_string(), pipeline.clone());
        Ok(pipeline)
    }
}

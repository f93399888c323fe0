//! Asks the demo model one question on each device and measures the answer.

use crate::{
    command::{checkpoint_meta::CheckpointMeta, device_choice::working_set},
    config::{GenerationDefaults, ModelSource},
    error::CommandError,
};
use candle_core::{DType, Device};
use moestro_base::metrics::Metrics;
use moestro_chat::Conversation;
use moestro_compute::{
    device::{CommandQueue, CpuArithmetic, Driver, GPU_KIND},
    experts::ReadMode,
};
use moestro_model::{
    model::{LoadOptions, Model, PassHooks, Qwen, Reference, Rows, StoreOptions, logits::argmax},
    plan::PlanOptions,
};
use serde::Serialize;
use serde_json::{Map, json};
use std::time::Instant;

pub const QUESTION: &str = "What is 12+7?";
/// Number of tokens to generate. End-of-sequence tokens do not stop the answer.
const COUNT: usize = 48;
/// Context in tokens, which is enough for the question and its answer.
const CONTEXT: usize = 256;

/// The answer of one device, or its error.
#[derive(Debug, Clone, Default, Serialize)]
pub struct DemoAnswer {
    pub device: String,
    pub ids: Vec<u32>,
    /// Text up to the first end-of-sequence token.
    pub text: String,
    pub prompt_tokens_per_second: f64,
    /// Decoding speed. `None` for the reference, which computes the whole answer in one pass.
    pub tokens_per_second: Option<f64>,
    pub error: Option<String>,
}

/// The demo model and the encoded question.
pub struct DemoModel {
    checkpoint: CheckpointMeta,
    prompt: Vec<u32>,
}

impl DemoModel {
    pub fn open() -> Result<Self, CommandError> {
        let checkpoint = CheckpointMeta::open(&ModelSource::Demo, GenerationDefaults::default())?;
        let messages = [json!({ "role": "user", "content": QUESTION })];
        let kwargs = Map::new();
        let conversation =
            Conversation { messages: &messages, tools: None, kwargs: &kwargs, add_generation_prompt: true };
        let prompt = match &checkpoint.template {
            Some(template) => template.render(&conversation)?,
            None => QUESTION.into(),
        };
        let prompt = checkpoint.tokenizer.encode(&prompt)?;
        Ok(Self { checkpoint, prompt })
    }

    fn load(&self, math: CpuArithmetic, gpu: Option<u64>) -> Result<Qwen, CommandError> {
        let plan =
            PlanOptions { context: Some(CONTEXT), prompt_cache: Some(0), stream: None, ..PlanOptions::default() };
        // Direct reads may shift experts within their slots to align them with disk blocks. A GPU does not accept
        // shifted experts.
        let store = StoreOptions { io: ReadMode::Buffered, ..StoreOptions::default() };
        let options = LoadOptions { math, gpu, plan, store, ..LoadOptions::default() };
        Ok(Qwen::load(&self.checkpoint.dir, &options, &Metrics::new("doctor", "cpu"), &mut |_, _| ())?)
    }

    /// The CPU's answer with one kind of arithmetic.
    pub fn on_cpu(&self, math: CpuArithmetic) -> Result<DemoAnswer, CommandError> {
        let device = match math {
            CpuArithmetic::F32 => "cpu, plain f32",
            CpuArithmetic::Integer => "cpu",
        };
        Ok(self.ask(device, self.load(math, None)?))
    }

    /// The GPU's answer. Errors of the GPU are part of the report.
    pub fn on_gpu(&self, gpu: CommandQueue<impl Driver>) -> Result<DemoAnswer, CommandError> {
        let qwen = self.load(CpuArithmetic::F32, Some(working_set(&gpu)))?;
        Ok(match qwen.move_to(gpu) {
            Ok(model) => self.ask(GPU_KIND, model),
            Err(refused) => failed(GPU_KIND, refused.error.to_string()),
        })
    }

    /// The answer of the reference implementation on a Candle device. The reference computes only whole sequences, so
    /// it evaluates `answer`, which is the answer of another device. The reference's answer ends at the first
    /// difference. Errors are part of the report.
    pub fn by_reference(&self, device: &Device, answer: &[u32]) -> DemoAnswer {
        let name = format!("reference, Candle's {}", if device.is_cpu() { "cpu" } else { GPU_KIND });
        let begin = Instant::now();
        let ids = [&self.prompt, answer].concat();
        let logits = Reference::open(&self.checkpoint.dir, device.clone(), DType::F32)
            .and_then(|reference| Ok(reference.forward(&ids)?.logits.to_vec2::<f32>()?));
        let logits = match logits {
            Ok(logits) => logits,
            Err(error) => return failed(&name, error.to_string()),
        };
        let speed = ids.len() as f64 / begin.elapsed().as_secs_f64().max(1e-9);
        let mut ids = Vec::new();
        for (row, other) in logits[self.prompt.len() - 1..].iter().zip(answer) {
            let id = argmax(row).unwrap_or(0);
            ids.push(id);
            if id != *other {
                break;
            }
        }
        self.answer(&name, ids, speed, None)
    }

    fn ask<M: Model>(&self, device: &str, mut model: M) -> DemoAnswer {
        let mut generate = || {
            let mut state = model.start()?;
            let begin = Instant::now();
            let mut row = model.forward_with(&mut state, &self.prompt, Rows::Last, &mut PassHooks::default())?;
            let prefilled = Instant::now();
            let mut ids = Vec::new();
            while ids.len() < COUNT {
                ids.push(argmax(row.row(0)).unwrap_or(0));
                row = model.forward_with(&mut state, &ids[ids.len() - 1..], Rows::Last, &mut PassHooks::default())?;
            }
            let rate = |tokens: usize, from: Instant, to: Instant| tokens as f64 / (to - from).as_secs_f64().max(1e-9);
            let end = Instant::now();
            Ok((ids, rate(self.prompt.len(), begin, prefilled), rate(COUNT, prefilled, end)))
        };
        // The first pass warms up pipelines, threads and pages. The second pass is measured.
        match generate().and_then(|_| generate()) {
            Ok((ids, prompt, decode)) => self.answer(device, ids, prompt, Some(decode)),
            Err::<_, moestro_model::error::ModelError>(error) => failed(device, error.to_string()),
        }
    }

    fn answer(&self, device: &str, ids: Vec<u32>, prompt: f64, decode: Option<f64>) -> DemoAnswer {
        let eos = &self.checkpoint.generation.eos;
        let len = ids.iter().position(|id| eos.contains(id)).unwrap_or(ids.len());
        let text = self.checkpoint.tokenizer.decode(&ids[..len]);
        let device = device.into();
        DemoAnswer { device, ids, text, prompt_tokens_per_second: prompt, tokens_per_second: decode, error: None }
    }
}

fn failed(device: &str, error: String) -> DemoAnswer {
    DemoAnswer { device: device.into(), error: Some(error), ..DemoAnswer::default() }
}

//! What `doctor` prints.

use super::answer::Answer;
use crate::{device::os, ops::check::Finding, plan::Size};
use serde::{Serialize, Serializer, ser::SerializeSeq};
use std::fmt;

/// What this program runs on.
#[derive(Debug, Serialize)]
pub struct Machine {
    version: &'static str,
    system: Option<String>,
    architecture: &'static str,
    processor: Option<String>,
    cores: usize,
    /// Bytes.
    memory: Option<u64>,
}

impl Machine {
    pub fn here(cores: usize) -> Self {
        Self {
            version: env!("CARGO_PKG_VERSION"),
            system: os::system(),
            architecture: std::env::consts::ARCH,
            processor: os::processor(),
            cores,
            memory: os::total_memory(),
        }
    }
}

/// A GPU and its kernels.
#[derive(Debug, Serialize)]
pub struct GpuReport {
    pub name: String,
    /// Bytes it recommends to be given at most.
    pub working_set: Option<u64>,
    pub compiled: usize,
    pub compile_seconds: f64,
    pub check_seconds: f64,
    #[serde(serialize_with = "findings")]
    pub kernels: Vec<Finding>,
}

/// All of it; `--json` prints it as it is.
#[derive(Debug, Serialize)]
pub struct Report {
    pub machine: Machine,
    #[serde(serialize_with = "findings")]
    pub processor: Vec<Finding>,
    #[serde(serialize_with = "gpu")]
    pub gpu: Result<GpuReport, String>,
    pub answers: Vec<Answer>,
}

fn findings<S: Serializer>(findings: &[Finding], to: S) -> Result<S::Ok, S::Error> {
    let mut list = to.serialize_seq(Some(findings.len()))?;
    for finding in findings {
        let difference = finding.outcome.as_ref().ok();
        list.serialize_element(&serde_json::json!({
            "name": finding.name,
            "agrees": finding.agrees(),
            "difference": difference.map(|(difference, _)| difference),
            "allowed": difference.map(|(_, allowed)| allowed),
            "error": finding.outcome.as_ref().err(),
        }))?;
    }
    list.end()
}

fn gpu<S: Serializer>(gpu: &Result<GpuReport, String>, to: S) -> Result<S::Ok, S::Error> {
    gpu.as_ref().ok().serialize(to)
}

impl Report {
    /// What differs or fails, by name.
    pub fn wrong(&self) -> Vec<String> {
        let kernels = self.gpu.iter().flat_map(|gpu| &gpu.kernels);
        let mut wrong: Vec<String> =
            self.processor.iter().chain(kernels).filter(|f| !f.agrees()).map(|f| f.name.clone()).collect();
        let first = self.answers.first();
        for answer in &self.answers {
            if answer.error.is_some() || Some(&answer.ids) != first.map(|first| &first.ids) {
                wrong.push(format!("the demo's answer ({})", answer.device));
            }
        }
        wrong
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Machine { version, system, architecture, processor, cores, memory } = &self.machine;
        let unknown = || "unknown".to_string();
        writeln!(f, "moestro {version}, {}, {architecture}", system.clone().unwrap_or_else(unknown))?;
        let memory = memory.map_or_else(unknown, |bytes| Size(bytes).to_string());
        writeln!(f, "{}, {cores} cores, {memory}", processor.clone().unwrap_or_else(unknown))?;
        writeln!(f)?;
        writeln!(
            f,
            "processor: quantised and plain products, each instruction set against plain Rust (scalar: against f32)"
        )?;
        table(f, &self.processor)?;
        writeln!(f)?;
        match &self.gpu {
            Ok(gpu) => {
                let working_set = gpu.working_set.map_or_else(unknown, |bytes| Size(bytes).to_string());
                writeln!(f, "{}: working set {working_set}", gpu.name)?;
                let (compile, check) = (gpu.compile_seconds, gpu.check_seconds);
                writeln!(
                    f,
                    "{} kernels made ready in {compile:.2} s, compared with the CPU in {check:.2} s",
                    gpu.compiled
                )?;
                table(f, &gpu.kernels)?;
            }
            Err(why) => writeln!(f, "no GPU: {why}")?,
        }
        writeln!(f)?;
        writeln!(f, "demo: one answer, greedily")?;
        let expected = self.answers.first().map(|answer| &answer.ids);
        for (index, answer) in self.answers.iter().enumerate() {
            match &answer.error {
                Some(error) => writeln!(f, "  {:<24} FAILED: {error}", answer.device)?,
                None => {
                    let same = match (index, Some(&answer.ids) == expected) {
                        (0, _) => &*format!("{} tokens", answer.ids.len()),
                        (_, true) => "the same tokens",
                        (_, false) => "OTHER TOKENS",
                    };
                    let (prompt, decode) = (answer.prompt_tokens_per_second, answer.tokens_per_second);
                    writeln!(f, "  {:<24} {same:<16} prompt {prompt:>8.1}/s, decode {decode:>7.1}/s", answer.device)?;
                }
            }
        }
        writeln!(f)?;
        let wrong = self.wrong();
        match wrong.is_empty() {
            true => writeln!(f, "everything agrees"),
            false => writeln!(f, "WRONG: {}", wrong.join(", ")),
        }
    }
}

fn table(f: &mut fmt::Formatter<'_>, findings: &[Finding]) -> fmt::Result {
    for finding in findings {
        let name = &finding.name;
        match &finding.outcome {
            Ok((0.0, _)) => writeln!(f, "  {name:<24} same bytes")?,
            Ok((difference, allowed)) => {
                let verdict = if finding.agrees() { "" } else { "  WRONG" };
                writeln!(f, "  {name:<24} off by {difference:.1e}, allowed {allowed:.0e}{verdict}")?;
            }
            Err(error) => writeln!(f, "  {name:<24} FAILED: {error}")?,
        }
    }
    Ok(())
}

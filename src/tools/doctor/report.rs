//! Prints the report of `moestro doctor` as text or JSON.

use super::{
    answer::{DemoAnswer, QUESTION},
    gpu::LaunchTimes,
    power_mode::power_mode,
};
use crate::tools::machine_report::MachineReport;
use moestro_base::platform::os;
use moestro_compute::ops::check::Finding;
use moestro_model::plan::Size;
use serde::{Serialize, Serializer};
use serde_json::json;
use std::fmt;

/// Description of the machine by the operating system.
#[derive(Debug, Serialize)]
pub struct HostInfo {
    pub version: String,
    system: Option<String>,
    architecture: &'static str,
    processor: Option<String>,
    cores: usize,
    /// Size of the machine's memory in bytes.
    memory: Option<u64>,
    /// The power mode of a Mac.
    power_mode: Option<&'static str>,
}

impl HostInfo {
    pub fn here() -> Self {
        Self {
            version: env!("CARGO_PKG_VERSION").into(),
            system: os::system(),
            architecture: std::env::consts::ARCH,
            processor: os::processor(),
            cores: os::physical_cores(),
            memory: os::total_memory(),
            power_mode: power_mode(),
        }
    }
}

/// Results for a GPU and its kernels.
#[derive(Debug, Serialize)]
pub struct GpuReport {
    pub name: String,
    /// Recommended working set in bytes.
    pub working_set: Option<u64>,
    pub compiled: usize,
    pub compile_seconds: f64,
    pub check_seconds: f64,
    pub times: Option<LaunchTimes>,
    pub kernels: Vec<Finding>,
}

/// The whole report.
#[derive(Debug, Serialize)]
pub struct DoctorReport {
    pub machine: HostInfo,
    pub processor: Vec<Finding>,
    /// Results for the GPU, or the reason why there is no GPU.
    #[serde(serialize_with = "gpu")]
    pub gpu: Result<GpuReport, String>,
    /// Question for the demo model.
    pub question: &'static str,
    pub answers: Vec<DemoAnswer>,
    /// Result of a launch after a provoked GPU error.
    pub recovery: Option<Finding>,
    /// Names of checks that differ or fail.
    pub wrong: Vec<String>,
}

/// The checks and the measurements, as a block to paste into an issue.
#[derive(Debug, Serialize)]
pub struct WholeReport {
    pub checks: DoctorReport,
    pub machine: MachineReport,
}

impl fmt::Display for WholeReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "```text\n{}{}```\n", self.checks, self.machine)
    }
}

fn gpu<S: Serializer>(gpu: &Result<GpuReport, String>, to: S) -> Result<S::Ok, S::Error> {
    match gpu {
        Ok(report) => report.serialize(to),
        Err(why) => json!({ "absent": why }).serialize(to),
    }
}

impl DoctorReport {
    pub fn new(processor: Vec<Finding>, gpu: Result<GpuReport, String>, answers: Vec<DemoAnswer>) -> Self {
        let machine = HostInfo::here();
        let question = QUESTION;
        let wrong = Vec::new();
        let mut report = Self { machine, processor, gpu, question, answers, recovery: None, wrong };
        let kernels = report.gpu.iter().flat_map(|gpu| &gpu.kernels);
        let findings = report.processor.iter().chain(kernels).filter(|finding| finding.is_fault());
        let answers = report.answers.iter().filter(|answer| report.verdict(answer) != AnswerVerdict::Same);
        report.wrong = findings
            .map(|finding| finding.name.clone())
            .chain(answers.map(|answer| format!("demo answer ({})", answer.device)))
            .collect();
        report
    }

    /// Compares an answer with the first answer. All answers must be equal.
    fn verdict<'a>(&self, answer: &'a DemoAnswer) -> AnswerVerdict<'a> {
        let expected = self.answers.first().map_or(&[][..], |first| &first.ids);
        match &answer.error {
            Some(error) => AnswerVerdict::Failed(error),
            None if answer.ids == expected => AnswerVerdict::Same,
            None => {
                let same = answer.ids.iter().zip(expected).take_while(|(found, expected)| found == expected);
                AnswerVerdict::Other(same.count())
            }
        }
    }
}

#[derive(PartialEq)]
enum AnswerVerdict<'a> {
    Same,
    /// The answer differs. The number is the count of equal tokens before the difference.
    Other(usize),
    Failed(&'a str),
}

impl fmt::Display for DoctorReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let HostInfo { version, system, architecture, processor, cores, memory, power_mode } = &self.machine;
        let unknown = || "unknown".to_string();
        let size = |bytes: Option<u64>| bytes.map_or_else(unknown, |bytes| Size(bytes).to_string());
        writeln!(f, "moestro {version} on {}, {architecture}", system.clone().unwrap_or_else(unknown))?;
        writeln!(f, "{}, {cores} cores, {}", processor.clone().unwrap_or_else(unknown), size(*memory))?;
        if let Some(power_mode) = power_mode {
            writeln!(f, "power mode: {power_mode}")?;
        }

        writeln!(f, "\nCPU, all weight formats: scalar compared with plain f32, other instruction sets with scalar")?;
        table(f, &self.processor)?;

        match &self.gpu {
            Ok(gpu) => {
                let GpuReport { name, working_set, compiled, compile_seconds, check_seconds, times, kernels } = gpu;
                writeln!(f, "\n{name}: working set {}", size(*working_set))?;
                write!(f, "{compiled} kernels compiled in {compile_seconds:.2} s (less if they were cached), ")?;
                writeln!(f, "compared with the CPU in {check_seconds:.2} s")?;
                if let Some(LaunchTimes { launch, commit, wait }) = times {
                    writeln!(
                        f,
                        "launch: {launch:.1} us to encode, {commit:.1} us to submit, {wait:.1} us until it has finished"
                    )?;
                }
                table(f, kernels)?;
            }
            Err(why) => writeln!(f, "\nno GPU: {why}")?,
        }

        writeln!(f, "\ndemo model: {:?}", self.question)?;
        for answer in &self.answers {
            let DemoAnswer { device, text, prompt_tokens_per_second: prompt, tokens_per_second: decode, .. } = answer;
            let decode = decode.map_or_else(String::new, |decode| format!(", decode {decode:>6.0}/s"));
            let speed = format!("prompt {prompt:>7.0}/s{decode:<17}");
            match self.verdict(answer) {
                AnswerVerdict::Same => writeln!(f, "  {device:<24} {speed}  {text:?}")?,
                AnswerVerdict::Other(same) => {
                    writeln!(f, "  {device:<24} {speed}  WRONG after {same} tokens: {text:?}")?
                }
                AnswerVerdict::Failed(error) => writeln!(f, "  {device:<24} FAILED: {error}")?,
            }
        }

        if let Some(recovery) = &self.recovery {
            writeln!(f, "\na provoked GPU error, and a launch after it:")?;
            table(f, std::slice::from_ref(recovery))?;
        }

        match (self.wrong.is_empty(), &self.gpu) {
            (true, Ok(_)) => writeln!(f, "\neverything agrees"),
            (true, Err(_)) => writeln!(f, "\neverything agrees; there was no GPU to compare"),
            (false, _) => writeln!(f, "\nWRONG: {}", self.wrong.join(", ")),
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
            Err(error) if finding.is_used => writeln!(f, "  {name:<24} FAILED: {error}")?,
            Err(error) => writeln!(f, "  {name:<24} failed, but no model uses it on this GPU: {error}")?,
        }
    }
    Ok(())
}

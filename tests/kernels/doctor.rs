//! Tests the comparisons of `moestro doctor` and the choice of `--device`, with kernels compiled for the host.

use crate::{
    double::{Double, Fault, Plan},
    gpu::HostGpu,
    host::Host,
};
use moestro::{command::device_choice::DeviceChoice, tools::doctor};
use moestro_compute::{
    device::{BufferAccess, CommandQueue, DeviceError, GPU_KIND, Gpu, Launch, Region, Slab, SyncPoint, Timeline},
    ops::check,
};
use std::{collections::BTreeSet, ops::Range, sync::Arc};

/// Implements the memory methods by calling the methods of the wrapped device.
macro_rules! memory_of {
    ($below:tt) => {
        fn working_set(&self) -> Option<u64> {
            None
        }

        fn allocate(&mut self, bytes: usize) -> Result<Region, DeviceError> {
            self.$below.allocate(bytes)
        }

        fn release(&mut self, buffer: u32) {
            self.$below.release(buffer);
        }

        fn adopt(&mut self, slab: &Arc<Slab>, range: Range<usize>) -> Result<Region, DeviceError> {
            self.$below.adopt(slab, range)
        }

        fn address(&mut self, buffer: u32) -> Result<u64, DeviceError> {
            self.$below.address(buffer)
        }

        fn max_threads(&mut self, kernel: &str) -> Result<u32, DeviceError> {
            self.$below.max_threads(kernel)
        }

        fn has_own_memory(&self) -> bool {
            self.$below.has_own_memory()
        }

        fn has_matrix_units(&self) -> bool {
            self.$below.has_matrix_units()
        }

        fn upload(&mut self, region: Region) -> Result<(), DeviceError> {
            self.$below.upload(region)
        }

        fn max_buffer_len(&self) -> usize {
            self.$below.max_buffer_len()
        }

        fn write(&mut self, region: Region, bytes: &[u8]) -> Result<(), DeviceError> {
            self.$below.write(region, bytes)
        }

        fn read(&mut self, region: Region, bytes: &mut [u8]) -> Result<(), DeviceError> {
            self.$below.read(region, bytes)
        }
    };
}

macro_rules! timeline_of {
    ($device:ty, $below:tt) => {
        impl Timeline for $device {
            fn sync_point(&mut self) -> SyncPoint {
                self.$below.sync_point()
            }

            fn completed(&mut self) -> SyncPoint {
                self.$below.completed()
            }

            fn wait_for(&mut self, point: SyncPoint) -> Result<(), DeviceError> {
                self.$below.wait_for(point)
            }
        }
    };
}

/// A device with a fault. Either the results of one kernel are wrong, or the kernel is refused.
struct Faulty {
    sound: HostGpu,
    kernel: &'static str,
    refuse: bool,
}

impl Faulty {
    fn new(kernel: &'static str, refuse: bool) -> Self {
        Self { sound: with_matrix_units(Host::fast()), kernel, refuse }
    }
}

/// A correct device with matrix units.
fn with_matrix_units(host: Host) -> HostGpu {
    let mut gpu = HostGpu::new(host);
    gpu.halves = true;
    gpu
}

timeline_of!(Faulty, sound);

impl Gpu for Faulty {
    fn name(&self) -> String {
        "faulty".into()
    }

    fn compile(&mut self) -> Vec<(String, Option<DeviceError>)> {
        match self.refuse {
            true => vec![("kernels/some.metal".into(), Some(DeviceError("line 1: no".into())))],
            false => Vec::new(),
        }
    }

    memory_of!(sound);

    fn launch(&mut self, launch: &Launch) -> Result<(), DeviceError> {
        if launch.kernel != self.kernel {
            return self.sound.launch(launch);
        }
        if self.refuse {
            return Err(DeviceError("refused by the driver".into()));
        }
        self.sound.launch(launch)?;
        self.sound.wait()?;
        for binding in launch.bindings.iter().filter(|binding| binding.access != BufferAccess::Read) {
            // This flips a bit at two places of the output. Each place is the high byte of a float or integer, or of
            // the second of two half-precision values.
            let places = BTreeSet::from([8, 12].map(|part| binding.region.len / part * 4 + 3));
            for at in places.into_iter().map(|at| binding.region.part(at, 1)) {
                let mut byte = [0];
                self.sound.read(at, &mut byte)?;
                self.sound.write(at, &[byte[0] ^ 0x08])?;
            }
        }
        Ok(())
    }

    fn commit(&mut self) -> Result<(), DeviceError> {
        self.sound.commit()
    }

    fn wait(&mut self) -> Result<(), DeviceError> {
        self.sound.wait()
    }
}

#[test]
fn doctor_compares_every_kernel() {
    let found = check::kernels(&mut with_matrix_units(Host::start()));
    for finding in &found {
        println!("{finding:?}");
    }
    let wrong: Vec<_> = found.iter().filter(|finding| !finding.agrees()).collect();
    assert!(wrong.is_empty(), "{wrong:?}");
    // The indexer has the same order of operations as the CPU. With other values, it could select other blocks.
    let selects = |finding: &&check::Finding| finding.name.starts_with("index_");
    let differences: Vec<_> = found.iter().filter(selects).map(|finding| finding.outcome.clone().unwrap().0).collect();
    assert_eq!(differences, [0.0; 3]);
    let names = found.iter().map(|finding| finding.name.as_str());
    let (others, compared): (BTreeSet<&str>, BTreeSet<&str>) = names.partition(|name| name.starts_with('('));
    assert_eq!(others, BTreeSet::from(["(order of launches)", "(shared memory)"]));
    let all = Host::start().names();
    assert_eq!(compared, all.iter().map(String::as_str).collect(), "a kernel that is not compared");
}

#[test]
#[ignore = "exhaustive: every kernel"]
fn doctor_finds_faults_in_every_kernel() {
    let mut missed: BTreeSet<String> = Host::fast().names().into_iter().collect();
    for part in check::parts() {
        let found = check::kernels_of(&mut with_matrix_units(Host::fast()), |name| name == part);
        for finding in found {
            let mut faulty = Faulty::new(finding.name.clone().leak(), false);
            let found = check::kernels_of(&mut faulty, |name| name == part);
            if found.iter().any(|with_fault| with_fault.name == finding.name && !with_fault.agrees()) {
                missed.remove(&finding.name);
            }
        }
    }
    assert!(missed.is_empty(), "no part of the check finds a fault in {missed:?}");
}

/// A device that ignores dependencies: it runs all launches between two waits in reverse order.
struct Unordered(HostGpu, Vec<Launch>);

timeline_of!(Unordered, 0);

impl Gpu for Unordered {
    memory_of!(0);

    fn name(&self) -> String {
        "unordered".into()
    }

    fn compile(&mut self) -> Vec<(String, Option<DeviceError>)> {
        Vec::new()
    }

    fn launch(&mut self, launch: &Launch) -> Result<(), DeviceError> {
        self.1.push(launch.clone());
        Ok(())
    }

    fn commit(&mut self) -> Result<(), DeviceError> {
        Ok(())
    }

    fn wait(&mut self) -> Result<(), DeviceError> {
        let launches: Vec<_> = self.1.drain(..).rev().collect();
        launches.iter().try_for_each(|launch| self.0.launch(launch))?;
        self.0.wait()
    }
}

#[test]
fn doctor_finds_launches_out_of_order() {
    let found = check::kernels(&mut Unordered(HostGpu::new(Host::fast()), Vec::new()));
    let wrong: Vec<&str> = found.iter().filter(|f| !f.agrees()).map(|f| f.name.as_str()).collect();
    assert_eq!(wrong, ["(order of launches)"]);
}

#[test]
fn doctor_reports_refused_kernel_and_continues() {
    let found = check::kernels(&mut Faulty::new("causal_conv", true));
    let of = |name: &str| found.iter().find(|finding| finding.name == name).unwrap();
    assert_eq!(of("causal_conv").outcome, Err("refused by the driver".into()));
    assert_eq!(of("kernels/some.metal").outcome, Err("line 1: no".into()));
    assert!(of("gemv_1").agrees() && of("moe_down").agrees() && of("attention_merge").agrees());
}

#[test]
#[ignore = "long: a whole report"]
fn doctor_report_of_a_working_gpu() {
    let double = Double::new(Host::plain());
    let control = double.control();
    let mut report = doctor::examine(Ok(Box::new(CommandQueue::new(double))), &[]).unwrap();
    assert!(report.wrong.is_empty(), "{report}");
    let text = report.to_string();
    println!("{text}");
    assert!(text.contains("us to submit") && report.gpu.as_ref().unwrap().times.is_some(), "{text}");
    assert!(text.contains("the double: working set unknown") && text.ends_with("everything agrees\n"), "{text}");
    let json = serde_json::json!(report);
    assert_eq!(json["answers"][2]["device"], GPU_KIND);
    assert_eq!(json["answers"][2]["ids"], json["answers"][0]["ids"]);
    assert_eq!(json["gpu"]["kernels"].as_array().unwrap().len(), Host::plain().names().len() + 2);
    // No error was provoked on the examined device, because macOS would refuse further work of the device.
    assert_eq!(control.lock().unwrap().calls.get("encode_fault"), None);
    let recover = |double| doctor::recover(Box::new(CommandQueue::new(double)));
    report.recovery = recover(Double::new(Host::fast()));
    assert!(report.to_string().contains("(an error, and after it) same bytes"), "{report}");
    // A device that does not recover is reported, but does not count as wrong.
    let banned = Double::new(Host::fast());
    banned.control().lock().unwrap().fault = Some(Plan { method: "commit", nth: 0, fault: Fault::Banned });
    report.recovery = recover(banned);
    assert!(report.to_string().contains("(an error, and after it) FAILED") && report.wrong.is_empty(), "{report}");
    assert_eq!(serde_json::json!(report)["recovery"]["agrees"], false);
}

#[test]
#[ignore = "long: a whole report"]
fn doctor_report_of_a_faulty_gpu() {
    let report = doctor::examine(Ok(Box::new(Faulty::new("moe_down", false))), &[]).unwrap();
    assert_eq!(report.wrong, ["moe_down", &format!("demo answer ({GPU_KIND})")]);
    let text = report.to_string();
    println!("{text}");
    assert!(
        text.contains("WRONG after ") && text.contains(&format!("WRONG: moe_down, demo answer ({GPU_KIND})")),
        "{text}"
    );
}

#[test]
fn auto_selects_gpu_that_matches_cpu() {
    let sound = || Ok(Some(Box::new(HostGpu::new(Host::fast())) as Box<dyn Gpu>));
    let faulty = || Ok(Some(Box::new(Faulty::new("router", false)) as Box<dyn Gpu>));
    let name =
        |found, asked| DeviceChoice::of(found, asked).map(|chosen| chosen.name()).map_err(|error| error.to_string());
    assert_eq!((name(sound(), false), name(sound(), true)), (Ok(GPU_KIND), Ok(GPU_KIND)));
    // A GPU that the user selected by name is used although it is faulty. `auto` selects the CPU.
    assert_eq!((name(faulty(), false), name(faulty(), true)), (Ok("cpu"), Ok(GPU_KIND)));
    let broken = || Err(DeviceError("no queue".into()));
    assert_eq!((name(broken(), false), name(Ok(None), false)), (Ok("cpu"), Ok("cpu")));
    assert_eq!(name(broken(), true), Err(format!("--device {GPU_KIND}: no queue")));
}

//! Counts the launches, command buffers and waits of one decoded token of the demo.

use crate::{
    forward::{options, planned},
    gpu::{Count, HostGpu},
    host::Host,
    queue,
};
use moestro_model::model::{Model, Rows};
use moestro_model::plan::Parallel;

#[test]
fn launches_ignore_the_number_of_sequences() {
    let gpu = HostGpu::new(Host::fast());
    let counted = gpu.count.clone();
    let model = queue::load_changed(false, |options| options.plan.parallel = Parallel::Count(5));
    let mut model = queue::move_to(model, gpu);
    let mut states: Vec<_> = (0..5).map(|_| model.start().unwrap()).collect();
    let mut count = |sequences: usize| {
        let mut rows: Vec<_> = states.iter_mut().map(|state| (state, 5)).take(sequences).collect();
        std::mem::take(&mut *counted.lock().unwrap());
        model.forward_each(&mut rows, &[]).unwrap();
        let Count { launches, waits, barriers, .. } = &*counted.lock().unwrap();
        (*launches, *waits, *barriers)
    };
    let two = count(2);
    println!("{} launches, {} waits and {} barriers", two.0, two.1, two.2);
    assert_eq!(count(5), two);
}

#[test]
fn decode_launches_and_waits_are_bounded() {
    let mut table = String::from("experts,layers,launches,command_buffers,waits,barriers\n");
    for streaming in [false, true] {
        let gpu = HostGpu::new(Host::fast());
        let counted = gpu.count.clone();
        let mut options = options(streaming);
        options.store.prefetch = moestro_compute::experts::Prefetch::Off;
        let mut model = planned(options, gpu);
        let layers = model.config().layers;
        // In the second pass, every expert that the token uses has a slot.
        for _ in 0..2 {
            let mut state = model.start().unwrap();
            std::mem::take(&mut *counted.lock().unwrap());
            model.forward(&mut state, &[100], Rows::Last).unwrap();
        }
        let count = counted.lock().unwrap();
        let Count { launches, command_buffers, waits, barriers, .. } = &*count;
        assert!(*launches <= 12 * layers, "{launches} launches");
        // The last wait is for the logits.
        assert_eq!(*waits, if streaming { layers + 1 } else { 1 });
        assert!(*command_buffers <= 1 + 2 * layers, "{command_buffers} command buffers");
        let experts = if streaming { "streaming" } else { "resident" };
        table += &format!("{experts},{layers},{launches},{command_buffers},{waits},{barriers}\n");
    }
    println!("{table}");
    let kept = include_str!("../../benches/results/schedule.csv");
    assert_eq!(kept.replace('\r', ""), table, "benches/results/schedule.csv is out of date");
}

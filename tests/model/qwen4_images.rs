//! Compares qwen4_exp with transformers for prompts with images, on a tiny checkpoint: the tower, the layers, the
//! selected blocks and the rows of the n-gram table. Prompts are cut everywhere, also inside images.
//! `tests/fixtures/qwen4_exp_images/make.py` describes the checkpoint.

use crate::{
    common::{
        ask, decode, distance,
        qwen4_exp::{LOGIT, STAGE, check},
        qwen4_images::{ImageCase, cases, dir, extend, load, picture, tower_rows},
    },
    qwen4_exp::{options, values},
};
use candle_core::{DType, Device};
use moestro_base::metrics::Metrics;
use moestro_engine::{self as engine, DraftPolicy, LookupDraft, MtpDraft, Options, Request, Sampling};
use moestro_model::model::{
    HiddenStates, HiddenTaps, LoadOptions, Model, MtpSource, PassHooks, PlacedImage, Qwen, Reference, Rows,
    SequenceState, StoreOptions, reference::Computed,
};

/// Largest allowed difference of a stream in the fast pass. In f32, transformers differs from its own results in f64 by
/// 1.6e-5, because norms of short heads amplify rounding.
const FAST_STAGE: f32 = 5e-5;

/// The model with the fewest slots: those of one token's experts.
fn streamed() -> Qwen {
    let config = load(options()).config().clone();
    let slots = Some(config.layers * config.experts_per_token());
    load(LoadOptions { store: StoreOptions { slots, ..StoreOptions::default() }, ..options() })
}

#[test]
fn tower_matches_transformers() {
    let model = load(options());
    for (name, expected) in tower_rows() {
        check(&name, &model.encode_image(&picture(&model, &name)).unwrap(), &expected, STAGE);
    }
}

#[test]
fn reference_matches_transformers_at_every_stage() {
    let model = load(options());
    let rows = tower_rows();
    for case in cases() {
        let images: Vec<(PlacedImage, Vec<f32>)> = case
            .placed(&model)
            .into_iter()
            .zip(&case.images)
            .map(|(placed, name)| (placed, rows[name].clone()))
            .collect();
        for precision in [DType::F32, DType::F64] {
            let reference = Reference::open(&dir(), Device::Cpu, precision).unwrap();
            let Computed { logits, residuals, stages, .. } =
                reference.forward_with_images(&case.ids(), &images).unwrap();
            let what = |stage: &str| format!("{} {precision:?} {stage}", case.name);
            let mut compared = 0;
            for (layer, found) in residuals.iter().enumerate() {
                let name = format!("layer{layer}.R");
                if let Some(expected) = case.stored.get(&name) {
                    check(&what(&name), &values(found), expected, STAGE);
                    compared += 1;
                }
                for stage in ["ple_rows", "qsa_blocks"] {
                    let name = format!("layer{layer}.{stage}");
                    let found = stages.get(&name);
                    assert_eq!(found.is_some(), case.stored.contains_key(&name), "{name}");
                    if let Some(found) = found {
                        check(&what(&name), &values(found), &case.stored[&name], 0.0);
                        compared += 1;
                    }
                }
            }
            assert!(compared >= 5, "{compared}");
            check_answer(&what("logits"), &case, &values(&logits));
        }
    }
}

/// Compares the logits of [`ImageCase::ids`], of which transformers' last rows are stored.
fn check_answer(what: &str, case: &ImageCase, logits: &[f32]) {
    let [decoded, last] = ["decode_logits", "last_logits"].map(|name| &case.stored[name]);
    check(what, &logits[logits.len() - decoded.len()..], decoded, LOGIT);
    let vocab = decoded.len() / case.greedy.len();
    let end = case.prompt.len() * vocab;
    check(what, &logits[end - last.len()..end], last, LOGIT);
}

#[test]
fn fast_pass_matches_transformers_in_every_layer() {
    for case in cases() {
        let mut model = load(options());
        let images = case.placed(&model);
        let layers = model.config().layers;
        let width = model.config().residual_width();
        model.set_taps(&HiddenTaps { layers: (0..layers).collect(), rows: 128 }).unwrap();
        let ids = case.ids();
        let mut state = model.start().unwrap();
        let logits = extend(&mut model, &mut state, &ids, &images, ids.len());
        check_answer(case.name, &case, &logits);
        let mut rows = Vec::new();
        model.tapped_rows(ids.len(), &mut rows).unwrap();
        for layer in 0..layers {
            let Some(expected) = case.stored.get(&format!("layer{layer}.R")) else { continue };
            let found: Vec<f32> =
                rows.chunks(layers * width).flat_map(|row| row[layer * width..][..width].to_vec()).collect();
            check(&format!("{} layer {layer}", case.name), &found, expected, FAST_STAGE);
        }
    }
}

#[test]
fn greedy_answer_matches_transformers() {
    for case in cases() {
        for mut model in [load(options()), streamed()] {
            let images = case.placed(&model);
            for chunk in [1, 5, 1024] {
                let mut state = model.start().unwrap();
                let logits = extend(&mut model, &mut state, &case.prompt, &images, chunk);
                let vocab = model.info().vocab;
                let (ids, rows) = decode(&mut model, &mut state, &logits[logits.len() - vocab..], case.greedy.len());
                assert_eq!(ids, case.greedy, "{}, chunks of {chunk}", case.name);
                check(case.name, &rows, &case.stored["decode_logits"], LOGIT);
            }
        }
    }
}

/// Cuts a prompt before, inside and after its images.
#[test]
fn every_cut_gives_the_same_bytes() {
    for case in cases() {
        let (mut model, mut small) = (load(options()), streamed());
        let images = case.placed(&model);
        let ids = case.ids();
        let mut state = model.start().unwrap();
        let expected = extend(&mut model, &mut state, &ids, &images, ids.len());
        for cut in 1..ids.len() {
            let model = if cut % 2 == 0 { &mut model } else { &mut small };
            let mut state = model.start().unwrap();
            let first = extend(model, &mut state, &ids[..cut], &images, 1024);
            let rest = extend(model, &mut state, &ids[cut..], &images, 1024);
            assert!([first, rest].concat() == expected, "{} cut at {cut}", case.name);
        }
    }
}

#[test]
fn snapshots_continue_inside_and_after_images() {
    for case in cases() {
        let mut model = load(options());
        let images = case.placed(&model);
        let ids = case.ids();
        let marks: Vec<usize> = (1..ids.len()).collect();
        let mut state = model.start().unwrap();
        let mut hooks = PassHooks { images: &images, snapshot_at: &marks, ..PassHooks::default() };
        let expected = model.forward_with(&mut state, &ids, Rows::All, &mut hooks).unwrap();
        for (at, snapshot) in marks.iter().copied().zip(std::mem::take(&mut hooks.snapshots)) {
            let mut restored = model.restore(&snapshot, None).unwrap();
            let rest = extend(&mut model, &mut restored, &ids[at..], &images, 1024);
            assert!(rest[..] == expected.data[at * expected.vocab..], "{} at {at}", case.name);
        }
    }
}

/// Rejected drafts open blocks again, also a block that starts in an image.
#[test]
fn rejected_drafts_after_images_leave_no_trace() {
    for case in cases() {
        let mut model = load(options());
        let images = case.placed(&model);
        let end = images.last().unwrap().tokens().end;
        let ids = case.ids();
        let vocab = model.info().vocab;
        let mut state = model.start().unwrap();
        let expected = extend(&mut model, &mut state, &ids, &images, ids.len());
        let mut state = model.start().unwrap();
        extend(&mut model, &mut state, &ids[..end], &images, 1024);
        let mut at = end;
        for round in 0.. {
            let kept = (round % 3 + 1).min(ids.len() - at);
            let draft: Vec<u32> = (0..5).map(|n| (n * 7 + at as u32) % 300).collect();
            let logits = model.verify(&mut state, &[&ids[at..at + kept], &draft[..]].concat()).unwrap();
            assert!(logits.data[..kept * vocab] == expected[at * vocab..][..kept * vocab], "{} at {at}", case.name);
            state.reject(draft.len()).unwrap();
            at += kept;
            if at == ids.len() {
                break;
            }
        }
    }
}

/// Drafts, other requests at the same time, and cached prefixes with images do not change answers.
#[test]
fn engine_gives_the_answers_of_transformers() {
    let requests = |model: &Qwen| -> Vec<(Request, Vec<u32>)> {
        let request = |case: ImageCase| {
            let images = case.placed(model);
            let request = Request::new(case.prompt, case.greedy.len(), Sampling::greedy());
            (Request { images, ignore_eos: true, ..request }, case.greedy)
        };
        cases().into_iter().map(request).collect()
    };
    for (drafter, parallel) in [(MtpSource::None, 1), (MtpSource::None, 4), (MtpSource::Checkpoint, 1)] {
        let has_head = matches!(drafter, MtpSource::Checkpoint);
        let model = load(LoadOptions { drafter, verify: true, ..options() });
        let requests = requests(&model);
        let speculate = if parallel == 1 { DraftPolicy::Force } else { DraftPolicy::Off };
        let size = model.info().snapshot_size;
        let engine_options =
            Options { speculate, parallel, prompt_cache: 8 * size.bytes(100, 0), ..Options::default() };
        let metrics = Metrics::new("test", "cpu");
        let (handle, _) = if has_head {
            let draft = MtpDraft::new(&model).unwrap();
            engine::spawn_with(model, Box::new(draft), engine_options, metrics).unwrap()
        } else {
            engine::spawn_with(model, Box::new(LookupDraft), engine_options, metrics).unwrap()
        };
        for (round, cached) in [(0, false), (1, true)] {
            let events: Vec<_> = requests.iter().map(|(request, _)| handle.submit(request.clone()).unwrap()).collect();
            for (events, (_, expected)) in events.into_iter().zip(&requests) {
                let (found, end) = engine::collect(events);
                let timings = end.unwrap().1;
                assert_eq!(&found, expected, "round {round}, {parallel} at the same time");
                assert_eq!(timings.cached_tokens > 0, cached);
                assert!(!has_head || timings.drafted_tokens > 0);
            }
        }
        // An image of the same size with other pixels has the same ids, but another answer.
        let (mut request, expected) = requests[0].clone();
        let other = &mut request.images[0];
        let mut image = (*other.image).clone();
        image.hash = [7; 32];
        image.pixels.data.iter_mut().for_each(|value| *value = 255 - *value);
        other.image = image.into();
        assert_ne!(ask(&handle, request).0, expected);
    }
}

/// Positions of images and rows of images change the logits, so the tests above would notice mistakes in them.
#[test]
fn mistakes_with_images_change_the_logits() {
    let case = &cases()[1];
    let mut model = load(options());
    let images = case.placed(&model);
    let mut last = |images: &[PlacedImage]| {
        let mut state = model.start().unwrap();
        extend(&mut model, &mut state, &case.prompt, images, 1024)
    };
    let expected = last(&images);
    let swapped: Vec<PlacedImage> = images
        .iter()
        .map(|placed| {
            let mut image = (*placed.image).clone();
            (image.height, image.width) = (image.width, image.height);
            PlacedImage { image: image.into(), ..*placed }
        })
        .collect();
    for (what, images) in
        [("no images", &[][..]), ("rows and columns swapped", &swapped[..]), ("one image", &images[..1])]
    {
        let off = distance(&last(images), &expected);
        assert!(off > 0.1, "{what}: off by {off}");
    }
}

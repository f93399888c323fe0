//! A delta net's whole layer: the projection in front, the convolution, the rule, and the product behind. Some of it need not be a
//! launch of its own where there are few rows: `kernels/linear.metal`.

use super::DeltaRule;
use crate::{
    device::{Binding, DeviceError, Dispatch, Effect, Region},
    ops::{Conv, Project, Run, cpu::Cpu, project::Halves},
};

/// Heads that a product behind the rule can norm.
const MOST_HEADS: usize = 64;

/// The four in turn, over the same rows. What lies between them is each device's own.
#[derive(Debug, Clone, Copy)]
pub struct DeltaNet<'a> {
    pub project: Project<'a>,
    pub conv: Conv<'a>,
    pub rule: DeltaRule<'a>,
    pub back: Project<'a>,
}

impl DeltaNet<'_> {
    pub(in crate::ops) fn touches(&self, see: &mut dyn FnMut(Region, Effect)) {
        let Self { conv: Conv { past, state, .. }, rule, back, .. } = self;
        let DeltaRule { shape, tokens, proj, out, .. } = *rule;
        past.touches(shape, see);
        see(back.y.floats(tokens * back.width()), Effect::Update);
        see(proj.floats(tokens * shape.width()), Effect::Write);
        rule.results([Effect::Write; 2], see);
        see(*state, Effect::Update);
        see(rule.state.floats(shape.values() * shape.dk), Effect::Update);
        see(out.floats(tokens * shape.values()), Effect::Write);
    }

    pub(in crate::ops) fn on_cpu(&self, cpu: &mut Cpu) -> Result<(), DeviceError> {
        let Self { project, conv, rule, back } = *self;
        cpu.run(&project.into())?;
        cpu.run(&conv.into())?;
        cpu.run(&rule.into())?;
        cpu.run(&back.into())
    }

    /// Three launches for one row, four for some. Their results are those of [`DeltaNet::apart`].
    pub fn dispatches(&self) -> Vec<Dispatch> {
        let Self { project, conv, rule, back } = self;
        // Rows that may be walked once more need what the convolution's own kernel leaves.
        let shape = rule.shape;
        let at_once =
            rule.tokens == 1 && rule.stored > rule.past.rows && project.norm.is_some_and(|norm| norm.keep.is_none());
        let front = if at_once { vec![self.convolved()] } else { vec![project.dispatch(), conv.dispatch()] };
        let behind = if shape.value_heads <= MOST_HEADS && shape.dv.is_multiple_of(16) {
            let squares = rule.out.floats(rule.tokens * shape.values() / 4);
            vec![rule.recurrence(at_once, Some(squares)), self.normed(squares)]
        } else {
            vec![rule.recurrence(at_once, None), rule.gated_norm(), back.dispatch()]
        };
        [front, behind].concat()
    }

    /// The same with a launch for each step.
    pub fn apart(&self) -> Vec<Dispatch> {
        let Self { project, conv, rule, back } = self;
        let front = [project.dispatch(), conv.dispatch()];
        front.into_iter().chain(rule.dispatches()).chain([back.dispatch()]).collect()
    }

    /// The same on matrix units.
    pub(in crate::ops) fn halves(&self, half: Halves) -> Vec<Dispatch> {
        let Self { project, conv, rule, back } = self;
        let front = project.halves(half.x).into_iter().chain([conv.dispatch()]);
        front.chain(rule.dispatches()).chain(back.halves(half.x)).collect()
    }

    /// The projection of one row, and its convolution.
    fn convolved(&self) -> Dispatch {
        let Conv { shape, past, proj, taps, state, out, .. } = self.conv;
        let (_, old) = shape.rows(1, proj, past);
        let channels = shape.channels();
        let mut dispatch = self.project.dispatch();
        dispatch.kernel = if dispatch.kernel == "linear_norm_1" { "linear_conv" } else { "linear_any_conv" };
        dispatch.args.push(past.rows as u32);
        let memory = [
            Binding::read(taps.floats(4 * channels)),
            Binding::read(if past.rows > 0 { old } else { taps }),
            Binding::update(state.floats(3 * channels)),
            Binding::write(out.floats(channels)),
        ];
        dispatch.bindings.splice(3..4, memory);
        dispatch
    }

    /// The product behind, of rows whose heads still lack the factors that follow from their `squares`.
    fn normed(&self, squares: Region) -> Dispatch {
        let shape = self.rule.shape;
        let mut dispatch = self.back.dispatch();
        dispatch.kernel = match dispatch.kernel {
            "linear_1" => "linear_heads_1",
            "linear_2" => "linear_heads_2",
            "linear_any_1" => "linear_any_heads_1",
            _ => "linear_any_heads_2",
        };
        dispatch.args.extend([shape.value_heads as u32, shape.dv as u32, shape.eps.to_bits()]);
        dispatch.bindings[1] = Binding::read(squares);
        dispatch.bindings.remove(3);
        dispatch
    }
}

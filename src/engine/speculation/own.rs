//! Drafts by the model itself, where its experts are streamed: with those that are in memory, and no others. The verify then
//! reads what is missing for all of the rows together.

use super::{Draft, Kind, Outlook, Sequence};
use crate::{
    error::ModelError,
    model::{Qwen, State},
};

#[derive(Debug, Clone, Copy, Default)]
pub struct Own;

impl Draft<Qwen> for Own {
    fn kind(&self) -> Kind {
        Kind::Own
    }

    fn propose(
        &mut self,
        model: &mut Qwen,
        state: &mut State,
        sequence: Sequence<'_>,
        most: usize,
        outlook: &mut Outlook<'_>,
        out: &mut Vec<u32>,
    ) -> Result<(), ModelError> {
        let drafted = draft(model, state, sequence.last, most, outlook, out);
        model.end_draft(state);
        drafted
    }
}

fn draft(
    model: &Qwen,
    state: &mut State,
    mut id: u32,
    most: usize,
    outlook: &mut Outlook<'_>,
    out: &mut Vec<u32>,
) -> Result<(), ModelError> {
    while out.len() < most {
        let logits = match model.draft(state, id) {
            // With few slots a layer may have none for the moment.
            Err(ModelError::NonePresent { .. }) => break,
            logits => logits?,
        };
        let Some(next) = outlook.draw(&logits.data) else { break };
        out.push(next);
        id = next;
    }
    Ok(())
}

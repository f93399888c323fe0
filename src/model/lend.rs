//! Embedding and head, for a draft that has none of its own. Both overwrite hidden rows of the last pass, so those are read
//! first.

use super::{Logits, Qwen, placed::Placed, tape::ROWS};
use crate::{
    device::Compute,
    error::ModelError,
    ops::{Embed, Project},
};

impl Qwen {
    /// The embedding's rows `[ids, hidden]` of a few tokens.
    pub fn embedding(&self, ids: &[u32]) -> Result<Vec<f32>, ModelError> {
        self.admit(0, ids)?;
        let hidden = self.parts.config.hidden;
        let Placed { run, buffers: b, .. } = &mut *self.placed.borrow_mut();
        few(ids.len(), b.rows)?;
        run.write_words(b.ids, ids)?;
        run.run(&Embed { table: &self.parts.net.embed, tokens: ids.len(), ids: b.ids, into: b.h }.into())?;
        let mut rows = vec![0.0; ids.len() * hidden];
        run.read_floats(b.h, &mut rows)?;
        Ok(rows)
    }

    /// The head's logits of a few rows `[rows, hidden]` that are normed already.
    pub fn score(&self, rows: &[f32]) -> Result<Logits, ModelError> {
        let (hidden, vocab) = (self.parts.config.hidden, self.parts.config.vocab);
        let tokens = rows.len() / hidden;
        let Placed { run, buffers: b, .. } = &mut *self.placed.borrow_mut();
        few(tokens, b.rows)?;
        run.write(b.normed.floats(rows.len()), bytemuck::cast_slice(rows))?;
        let matrices = std::slice::from_ref(self.parts.net.head());
        run.run(&Project { x: b.normed, tokens, norm: None, matrices, y: b.logits, add: false }.into())?;
        let mut data = vec![0.0; tokens * vocab];
        run.read_floats(b.logits, &mut data)?;
        Ok(Logits { vocab, data })
    }

    /// The threads that compute for the model when it does not.
    pub fn compute(&self) -> Compute {
        self.parts.compute.clone()
    }
}

fn few(rows: usize, room: usize) -> Result<(), ModelError> {
    let most = ROWS.min(room);
    if rows <= most { Ok(()) } else { Err(ModelError::Config(format!("a draft has {rows} rows; there may be {most}"))) }
}

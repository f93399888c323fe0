//! Safetensors files as maps that tests change.

use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use std::collections::BTreeMap;

/// Tensors by name, with type, shape and bytes.
pub type Tensors = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

/// The tensors of the file with these bytes.
pub fn read(file: &[u8]) -> Tensors {
    let tensors = SafeTensors::deserialize(file).unwrap().tensors().into_iter();
    tensors.map(|(name, tensor)| (name, (tensor.dtype(), tensor.shape().to_vec(), tensor.data().to_vec()))).collect()
}

/// The bytes of a file with these tensors.
pub fn serialized<'a>(tensors: impl IntoIterator<Item = (&'a String, &'a (Dtype, Vec<usize>, Vec<u8>))>) -> Vec<u8> {
    let views = tensors
        .into_iter()
        .map(|(name, (dtype, shape, data))| (name, TensorView::new(*dtype, shape.clone(), data).unwrap()));
    let metadata = [("format".to_owned(), "pt".to_owned())].into();
    safetensors::serialize(views, Some(metadata)).unwrap()
}

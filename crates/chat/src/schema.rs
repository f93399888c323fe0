//! JSON schemas as clients write them: references, the values that a schema allows, and the parameters of a tool.
//!
//! The grammar of a call and the reader of a call both use [`ValueType`] and [`ParameterSet`], so that what the grammar
//! allows is what the reader reads.

mod document;
mod parameters;
mod string_formats;
mod text_limits;
mod type_set;
mod value_type;

pub use document::{Document, WITH_OBJECT, normalized};
pub use parameters::{MAX_PARAMETER_SETS, OpenNames, ParameterSet, any_value, parameter_sets};
pub use string_formats::format_pattern;
pub use text_limits::TextLimits;
pub use type_set::TypeSet;
pub use value_type::{ValueType, allows_nothing};

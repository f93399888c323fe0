//! The ranges of integers, also of `format`s such as `int32`.

use crate::schema::TypeSet;
use serde_json::{Map, Value};

/// Largest absolute value of an integer for which the schema sets no bounds. Many JSON readers only hold 64 bits, and
/// without a bound a model could write digits until its token limit. This is also the largest bound that can be
/// compiled for a number that is not an integer.
pub const MAX_INTEGER: f64 = 1e18;

/// The integers of a format such as `int32` or `uint8`, as generators of C#, Rust and OpenAPI write them.
/// `None` for another format.
pub fn range(format: &str) -> Option<(f64, f64)> {
    let (is_unsigned, name) = format.strip_prefix('u').map_or((false, format), |name| (true, name));
    let digits = name.strip_prefix("int").filter(|digits| digits.bytes().all(|digit| digit.is_ascii_digit()))?;
    let bits: u8 = digits.parse().ok().filter(|bits| *bits > 0)?;
    let count = f64::from(bits).exp2();
    let (min, max) = if is_unsigned { (0.0, count - 1.0) } else { (-count / 2.0, count / 2.0 - 1.0) };
    Some((min.max(-MAX_INTEGER), max.min(MAX_INTEGER)))
}

/// Restricts numbers to the integers of a format. Without a type, a part of an `allOf` or a reference has the numbers.
pub fn keep(schema: &mut Map<String, Value>, (min, max): (f64, f64)) {
    let types = TypeSet::named_by(schema);
    if !types.is_empty() && !types.has(TypeSet::INTEGER) {
        return;
    }
    if types.has(TypeSet::NUMBER) {
        let others = types.without(TypeSet::NUMBER).or(TypeSet::INTEGER);
        schema.insert("type".into(), others.names().collect::<Vec<_>>().into());
    }
    for (key, exclusive, sign, limit) in
        [("minimum", "exclusiveMinimum", 1.0, min), ("maximum", "exclusiveMaximum", -1.0, max)]
    {
        let bounds = [key, exclusive].into_iter().filter_map(|key| schema.get(key)?.as_f64());
        if bounds.into_iter().all(|bound| sign * bound < sign * limit) {
            schema.shift_remove(exclusive);
            schema.insert(key.into(), limit.into());
        }
    }
}

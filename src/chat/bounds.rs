//! The memory that a template may take: text and lists are counted as they are made.
//!
//! A filter, method or function counts its result, and before it begins if that can be much more than it is given. Where
//! minijinja makes text without asking anybody, `operands` has put one of the filters below.

use super::python;
use minijinja::{
    Environment, Error, ErrorKind, State, Value, filters, functions,
    value::{Rest, ValueKind, ValueOrKwargs},
};
use std::{
    cell::{Cell, RefCell},
    fmt::{self, Write as _},
    io,
};

/// Bytes of text that one rendering may make for each byte that it is given, and beside.
const TIMES: usize = 32;
const BESIDE: usize = 16 << 20;
/// Digits of a width or precision in a format.
const DIGITS: usize = 4;
/// Rows of `slice` and `batch`.
const ROWS: usize = 100_000;

/// The filters behind the operands of `+` and `~`, behind those of `*`, and around a slice.
pub(super) const ADDED: &str = "counted_sum";
pub(super) const WRITTEN: &str = "counted_text";
pub(super) const MULTIPLIED: &str = "counted_product";
pub(super) const FACTOR: &str = "counted_factor";
pub(super) const SLICED: &str = "counted_slice";
/// The filter that stands in long plain text.
pub(super) const PLAIN: &str = "counted_plain";

thread_local! {
    /// Bytes that the rendering on this thread may still make.
    static LEFT: Cell<usize> = const { Cell::new(0) };
    /// The left operands of the products that are being computed, the innermost last.
    static PRODUCTS: RefCell<Vec<Operand>> = const { RefCell::new(Vec::new()) };
}

/// An operand of a product.
#[derive(Clone, Copy)]
enum Operand {
    Number(usize),
    /// A text or list of so many bytes.
    Bytes(usize),
}

impl Operand {
    fn of(value: &Value) -> Self {
        match value.as_usize() {
            Some(number) => Self::Number(number),
            None => Self::Bytes(length(value)),
        }
    }
}

/// Begins a rendering of `bytes` of messages and all on this thread.
pub(super) fn begin(bytes: usize) {
    LEFT.set(bytes.saturating_mul(TIMES).saturating_add(BESIDE));
    PRODUCTS.take();
}

/// Counts `bytes` that are about to be made.
fn spend(bytes: usize) -> Result<(), Error> {
    let left = LEFT.get().checked_sub(bytes);
    LEFT.set(left.unwrap_or(0));
    left.map(|_| ()).ok_or_else(too_much)
}

fn too_much() -> Error {
    invalid("the template makes too much text of what it was given")
}

fn invalid(why: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, why.into())
}

/// A prompt that is being written, of bounded length.
#[derive(Default)]
pub(super) struct Prompt(pub Vec<u8>);

impl io::Write for Prompt {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        spend(bytes.len()).map_err(io::Error::other)?;
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Text that is being made of a value. A value may hold itself many times over, so each piece is counted as it comes; what
/// is too much is left out, and [`Text::check`] says so.
#[derive(Default)]
pub(super) struct Text<W = String> {
    out: W,
    failed: bool,
}

impl<W> Text<W> {
    /// An error if it was too much already.
    pub fn check(&self) -> Result<(), Error> {
        if self.failed { Err(too_much()) } else { Ok(()) }
    }
}

impl Text {
    pub fn push_str(&mut self, piece: &str) {
        // `failed` keeps the error.
        let _ = self.write_str(piece);
    }

    pub fn made(self) -> Result<String, Error> {
        self.check()?;
        Ok(self.out)
    }
}

impl<W: fmt::Write> fmt::Write for Text<W> {
    fn write_str(&mut self, piece: &str) -> fmt::Result {
        self.failed |= spend(piece.len()).is_err();
        if self.failed { Err(fmt::Error) } else { self.out.write_str(piece) }
    }
}

/// Makes the library's filters and functions count.
pub(super) fn install(env: &mut Environment) {
    // Both write a value, or all there are, as Rust's debugger would.
    env.remove_filter("pprint");
    env.remove_global("debug");
    let of_text = [
        ("capitalize", Value::from_function(filters::capitalize)),
        ("e", Value::from_function(filters::escape)),
        ("escape", Value::from_function(filters::escape)),
        ("format", Value::from_function(filters::format)),
        ("indent", Value::from_function(filters::indent)),
        ("join", Value::from_function(filters::join)),
        ("lines", Value::from_function(filters::lines)),
        ("lower", Value::from_function(filters::lower)),
        ("replace", Value::from_function(filters::replace)),
        ("split", Value::from_function(filters::split)),
        ("title", Value::from_function(filters::title)),
        ("upper", Value::from_function(filters::upper)),
    ];
    for (name, filter) in of_text {
        add_of_text(env, name, filter);
    }
    let of_lists = [
        ("batch", Value::from_function(filters::batch)),
        ("chain", Value::from_function(filters::chain)),
        ("dictsort", Value::from_function(filters::dictsort)),
        ("groupby", Value::from_function(filters::groupby)),
        ("items", Value::from_function(filters::items)),
        ("list", Value::from_function(filters::list)),
        ("map", Value::from_function(filters::map)),
        ("reject", Value::from_function(filters::reject)),
        ("rejectattr", Value::from_function(filters::rejectattr)),
        ("reverse", Value::from_function(filters::reverse)),
        ("select", Value::from_function(filters::select)),
        ("selectattr", Value::from_function(filters::selectattr)),
        ("slice", Value::from_function(filters::slice)),
        ("sort", Value::from_function(filters::sort)),
        ("sum", Value::from_function(filters::sum)),
        ("unique", Value::from_function(filters::unique)),
        ("zip", Value::from_function(filters::zip)),
    ];
    for (name, filter) in of_lists {
        let filter = counting(name, filter);
        env.add_filter(name, move |state: &mut State, args: Rest<ValueOrKwargs>| filter(state, &args.into_values()));
    }
    for (name, function) in
        [("dict", Value::from_function(functions::dict)), ("namespace", Value::from_function(functions::namespace))]
    {
        let function = counting(name, function);
        env.add_function(name, move |state: &mut State, args: Rest<ValueOrKwargs>| {
            function(state, &args.into_values())
        });
    }
    env.add_filter(PLAIN, |_: &Value, bytes: usize| spend(bytes).map(|()| ""));
    env.add_filter(ADDED, counted);
    env.add_filter(SLICED, counted);
    env.add_filter(WRITTEN, written);
    env.add_filter(MULTIPLIED, |value: &Value| {
        PRODUCTS.with_borrow_mut(|products| products.push(Operand::of(value)));
        value.clone()
    });
    env.add_filter(FACTOR, |value: &Value| -> Result<Value, Error> {
        let left = PRODUCTS.with_borrow_mut(Vec::pop);
        match (left, Operand::of(value)) {
            (Some(Operand::Bytes(bytes)), Operand::Number(times))
            | (Some(Operand::Number(times)), Operand::Bytes(bytes)) => spend(bytes.saturating_mul(times))?,
            _ => {}
        }
        Ok(value.clone())
    });
}

/// Adds a filter whose arguments are text, or are written as text.
pub(super) fn add_of_text(env: &mut Environment, name: &'static str, filter: Value) {
    let filter = counting(name, filter);
    env.add_filter(name, move |state: &mut State, args: Rest<ValueOrKwargs>| -> Result<Value, Error> {
        let text = |value: &Value| if compound(value) { Ok(Value::from(string(value)?)) } else { Ok(value.clone()) };
        let mut args = args.into_values();
        for (i, arg) in args.iter_mut().enumerate() {
            if name == "join" && i == 0 && arg.as_str().is_none() {
                *arg = arg.try_iter()?.map(|item| text(&item)).collect::<Result<Vec<Value>, Error>>()?.into();
            } else if !arg.is_kwargs() {
                *arg = text(arg)?;
            } else if arg.try_iter()?.any(|key| arg.get_item(&key).is_ok_and(|value| compound(&value))) {
                return Err(invalid(format!("{name}: an argument with a name must be text or a number")));
            }
        }
        filter(state, &args)
    });
}

/// Calls `filter`, and counts what it is about to make and what it has made.
fn counting(
    name: &'static str,
    filter: Value,
) -> impl Fn(&mut State, &[Value]) -> Result<Value, Error> + Send + Sync + 'static {
    move |state, args| {
        spend(made(name, args)?)?;
        let given = args.first().and_then(Value::as_str).map_or(0, str::len);
        let result = filter.call(state, args)?;
        spend(of_result(&result, given))?;
        Ok(result)
    }
}

/// The bytes of a result: those of a list made of a text are the text's, too.
fn of_result(result: &Value, given: usize) -> usize {
    length(result).saturating_add(if compound(result) { given } else { 0 })
}

/// True for a value that holds others.
fn compound(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable | ValueKind::Map | ValueKind::Plain)
}

fn counted(value: &Value) -> Result<Value, Error> {
    spend(length(value))?;
    Ok(value.clone())
}

/// The value as the text that is joined to another.
fn written(value: &Value) -> Result<Value, Error> {
    if value.as_str().is_some() { counted(value) } else { Ok(Value::from(string(value)?)) }
}

/// Writes `str(value)`, counted.
pub(super) fn write(out: &mut impl fmt::Write, value: &Value) -> Result<(), Error> {
    let mut text = Text { out, failed: false };
    let written = python::write(&mut text, value);
    text.check()?;
    Ok(written?)
}

/// `str(value)`, counted.
pub(super) fn string(value: &Value) -> Result<String, Error> {
    let mut text = Text::default();
    python::write(&mut text, value).map_err(|_| too_much())?;
    text.made()
}

/// Counts what a method of a string is about to make.
pub(super) fn method(value: &Value, method: &str, args: &[Value]) -> Result<(), Error> {
    if !matches!(method, "replace" | "join" | "format") {
        return Ok(());
    }
    // The string that joins stands in front.
    let all: Vec<Value> = match (method, args) {
        ("join", [items, ..]) => vec![items.clone(), value.clone()],
        _ => std::iter::once(value).chain(args).cloned().collect(),
    };
    spend(made(method, &all)?)
}

/// Counts the result of a method of `value`.
pub(super) fn result(value: &Value, result: &Value) -> Result<(), Error> {
    spend(of_result(result, value.as_str().map_or(0, str::len)))
}

/// The size of the filter `name`'s result for `args`, in bytes; an error if that is beyond measure.
fn made(name: &str, args: &[Value]) -> Result<usize, Error> {
    let Some(first) = args.first() else { return Ok(0) };
    let text = first.as_str().unwrap_or_default();
    let number = |value: &Value| value.as_usize();
    Ok(match (name, &args[1..]) {
        ("replace", [from, to, ..]) => {
            let (text, from) = (string(first)?, string(from)?);
            text.len().saturating_add(text.matches(&*from).count().saturating_mul(length(to)))
        }
        ("join", rest) => {
            let joiner = rest.first().map_or(0, length);
            // A string is joined by its characters.
            let mut sum = text.len().saturating_add(text.chars().count().saturating_mul(joiner));
            if !text.is_empty() {
                return Ok(sum);
            }
            for item in first.try_iter()? {
                sum = sum.saturating_add(length(&item)).saturating_add(joiner);
            }
            sum
        }
        ("indent", rest) => {
            let width = rest.first().and_then(number).unwrap_or(4);
            text.len().saturating_add((text.lines().count() + 1).saturating_mul(width))
        }
        ("format", rest) => {
            let wide = text.split(|c: char| !c.is_ascii_digit()).any(|digits| digits.len() > DIGITS);
            let given = |value: &Value| value.as_i64().is_some_and(|n| n.unsigned_abs() >= 10u64.pow(DIGITS as u32));
            if wide || (text.contains('*') && rest.iter().any(given)) {
                return Err(invalid("format: a width or precision is too large"));
            }
            let places = text.matches(['%', '{', '*']).count();
            let longest = rest.iter().map(length).max().unwrap_or(0).saturating_add(10usize.pow(DIGITS as u32));
            text.len().saturating_add(places.saturating_mul(longest))
        }
        ("slice" | "batch", [count, ..]) => match number(count) {
            Some(count) if count > ROWS => return Err(invalid(format!("{name}: more than {ROWS} rows"))),
            count => (count.unwrap_or(0) + first.len().unwrap_or(0)).saturating_mul(size_of::<Value>()),
        },
        _ => 0,
    })
}

/// The length of a value as text: exact for strings, and for others what their parts have at least.
fn length(value: &Value) -> usize {
    match value.kind() {
        ValueKind::String => value.as_str().map_or(0, str::len),
        ValueKind::Seq | ValueKind::Iterable | ValueKind::Map => {
            value.len().unwrap_or(0).saturating_mul(size_of::<Value>())
        }
        _ => 16,
    }
}

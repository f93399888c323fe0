//! Values of flags: enumerations, and parsers of numbers, sizes, durations and origins. clap prints the flag and the
//! value before each error.

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use moestro_compute::{
    experts::{Prefetch, ReadMode},
    ops::KvBits,
};
use moestro_engine::DraftPolicy;
use moestro_model::plan::Parallel;
use std::{fmt, net::Ipv6Addr, time::Duration};

/// Id of the option `--model`. The option and the argument MODEL set the same setting.
pub const MODEL_OPTION: &str = "model_option";

/// The device that computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum Device {
    /// A GPU if its kernels agree with the CPU, else the CPU.
    #[default]
    Auto,
    Cpu,
    /// Metal (macOS), or an error.
    Metal,
    /// CUDA (Linux; experimental), or an error.
    Cuda,
}

/// On, off, or chosen by the program.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum Switch {
    #[default]
    Auto,
    On,
    Off,
}

impl Switch {
    /// What the user decided. `None` for `Auto`.
    pub fn decided(self) -> Option<bool> {
        match self {
            Self::Auto => None,
            Self::On => Some(true),
            Self::Off => Some(false),
        }
    }
}

/// Whether a server packs models.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum PackMode {
    #[default]
    Off,
    Auto,
}

/// The format of the log's lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum LogFormat {
    #[default]
    Text,
    /// One object per line.
    Json,
}

/// The minimum severity of messages in the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum LogLevel {
    Error,
    #[value(alias = "warning")]
    Warn,
    Info,
    Debug,
    Trace,
}

/// A coding agent that `launch` can start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Agent {
    /// Claude Code
    #[value(alias = "claude-code")]
    Claude,
    /// Codex of OpenAI
    Codex,
    /// opencode
    Opencode,
    /// Qwen Code
    #[value(alias = "qwen-code")]
    Qwen,
    /// aider
    Aider,
    /// GitHub Copilot CLI
    Copilot,
    /// pi
    Pi,
    /// Continue's command line
    Continue,
}

/// A maximum number of tokens; `None` means no maximum.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TokenBudget(pub Option<usize>);

/// The source of drafts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DraftModel {
    /// The MTP head if the checkpoint has one, else lookup.
    Auto,
    Mtp,
    Lookup,
    Off,
    /// A directory or a hub id.
    Model(String),
}

/// A [`size`], or `off`.
pub fn size_or_off(text: &str) -> Result<u64, String> {
    if matches!(text.trim(), "0" | "off") { Ok(0) } else { size(text) }
}

/// A size in bytes. `8GiB` and `8G` are 8 * 2^30, `8GB` is 8 * 10^9, a plain number is bytes. K, M, G and T in any
/// case.
pub fn size(text: &str) -> Result<u64, String> {
    let wrong = || format!("{text:?} is not a size such as 8GiB, 8G or 500M");
    let text = text.trim();
    let unit = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(unit);
    // A plain "8" is more likely a missing unit than 8 bytes.
    if unit.is_empty() && number.parse::<f64>().is_ok_and(|number| (1.0..1e6).contains(&number)) {
        return Err(format!("{number} is {number} bytes; did you mean {number}GiB?"));
    }
    let number: f64 = number.parse().map_err(|_| wrong())?;
    let unit = unit.trim().to_ascii_lowercase();
    let mut letters = unit.chars();
    let power = match letters.next() {
        None | Some('b') => 0,
        Some('k') => 1,
        Some('m') => 2,
        Some('g') => 3,
        Some('t') => 4,
        Some(_) => return Err(wrong()),
    };
    let base: u64 = match (power, letters.as_str()) {
        (0, "") => 1,
        (1.., "" | "i" | "ib") => 1024,
        (1.., "b") => 1000,
        _ => return Err(wrong()),
    };
    let bytes = number * base.pow(power) as f64;
    if bytes < 1.0 || bytes >= u64::MAX as f64 { Err(wrong()) } else { Ok(bytes as u64) }
}

/// The source of drafts. A directory with one of these names needs a slash.
pub fn draft(text: &str) -> Result<DraftModel, String> {
    match text {
        "lookup" => Ok(DraftModel::Lookup),
        "off" => Ok(DraftModel::Off),
        "auto" => Ok(DraftModel::Auto),
        "mtp" => Ok(DraftModel::Mtp),
        "" => Err("it is empty".into()),
        _ => Ok(DraftModel::Model(text.into())),
    }
}

/// A value of a flag: its name, its meaning in `--help`, and what it stands for.
type NamedValue<T> = (&'static str, Option<&'static str>, T);

/// Parses the name of one of `values`, whose type another crate defines.
fn named<T: Copy + Send + Sync>(values: &'static [NamedValue<T>]) -> impl TypedValueParser<Value = T> {
    let names = values.iter().map(|(name, meaning, _)| PossibleValue::new(*name).help(*meaning));
    PossibleValuesParser::new(names).try_map(|text| {
        let value = values.iter().find(|(name, ..)| text.eq_ignore_ascii_case(name));
        value.map(|(.., value)| *value).ok_or("it is not one of the possible values")
    })
}

/// When drafts are used.
pub fn speculation() -> impl TypedValueParser<Value = DraftPolicy> {
    named(&[
        ("auto", Some("While they save time"), DraftPolicy::Auto),
        ("off", None, DraftPolicy::Off),
        ("force", Some("Always, with the maximum number of tokens, for measurements"), DraftPolicy::Force),
    ])
}

/// How experts are read.
pub fn expert_io() -> impl TypedValueParser<Value = ReadMode> {
    const AUTO: &str =
        "Through the page cache if the memory outside the limit holds every expert, else direct if possible";
    named(&[
        ("auto", Some(AUTO), ReadMode::Auto),
        ("direct", Some("Bypasses the page cache"), ReadMode::Direct),
        ("buffered", Some("Through the page cache"), ReadMode::Buffered),
    ])
}

/// Whether experts are read ahead.
pub fn prefetch() -> impl TypedValueParser<Value = Prefetch> {
    named(&[("auto", None, Prefetch::Auto), ("on", None, Prefetch::On), ("off", None, Prefetch::Off)])
}

pub fn on_off() -> impl TypedValueParser<Value = bool> {
    named(&[("on", None, true), ("off", None, false)])
}

pub fn kv_bits(text: &str) -> Result<KvBits, String> {
    match text {
        "16" => Ok(KvBits::Sixteen),
        "8" => Ok(KvBits::Eight),
        "4" => Ok(KvBits::Four),
        _ => Err("use 16, 8 or 4".into()),
    }
}

/// A number of requests from 1 to 64, or `auto`.
pub fn parallel(text: &str) -> Result<Parallel, String> {
    match text {
        "auto" => Ok(Parallel::Auto),
        _ => up_to::<64>(text).map(Parallel::Count).map_err(|error| format!("{error}, or auto")),
    }
}

/// Maximum number of drafted tokens per pass. The decode kernels verify at most this many together.
pub fn drafts(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|count| (1..=15).contains(count)).ok_or_else(|| "it is not a number from 1 to 15".into())
}

/// An integer from 1 up.
pub fn count(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|&count| count > 0).ok_or_else(|| "it must be a whole number, at least 1".into())
}

/// An integer from 1 to `MAX`.
pub fn up_to<const MAX: usize>(text: &str) -> Result<usize, String> {
    range::<1, MAX>(text)
}

/// An integer from `MIN` to `MAX`.
pub fn range<const MIN: usize, const MAX: usize>(text: &str) -> Result<usize, String> {
    let fits = text.parse().ok().filter(|count| (MIN..=MAX).contains(count));
    fits.ok_or_else(|| format!("it must be a whole number from {MIN} to {MAX}"))
}

/// A port. 0 means a free one.
pub fn port(text: &str) -> Result<u16, String> {
    range::<0, { u16::MAX as usize }>(text).map(|port| port as u16)
}

/// The seed of a sampler.
pub fn seed(text: &str) -> Result<u64, String> {
    text.parse().map_err(|_| format!("it must be a whole number from 0 to {}", u64::MAX))
}

/// A temperature. Above 2 no model writes text.
pub fn temperature(text: &str) -> Result<f32, String> {
    number(text, |n| (0.0..=2.0).contains(&n)).ok_or_else(|| "it must be a number from 0 to 2".into())
}

/// A number of tokens, or -1 for no limit.
pub fn budget(text: &str) -> Result<TokenBudget, String> {
    match text.parse::<i64>() {
        Ok(-1) => Ok(TokenBudget(None)),
        Ok(tokens @ 0..) => Ok(TokenBudget(Some(tokens as usize))),
        _ => Err("it must be a whole number from 0 up, or -1 for no limit".into()),
    }
}

pub fn not_negative(text: &str) -> Result<f32, String> {
    number(text, |n| n >= 0.0).ok_or_else(|| "it is not a number from 0 up".into())
}

pub fn positive(text: &str) -> Result<f32, String> {
    number(text, |n| n > 0.0).ok_or_else(|| "it is not a number above 0".into())
}

/// A probability.
pub fn probability(text: &str) -> Result<f32, String> {
    number(text, |n| (0.0..=1.0).contains(&n)).ok_or_else(|| "it is not between 0 and 1".into())
}

fn number(text: &str, fits: impl Fn(f32) -> bool) -> Option<f32> {
    text.parse().ok().filter(|&number: &f32| number.is_finite() && fits(number))
}

/// A [`duration`] above zero.
pub fn time_limit(text: &str) -> Result<Duration, String> {
    let limit = duration(text)?;
    if limit.is_zero() { Err("it must be more than 0".into()) } else { Ok(limit) }
}

/// A duration with a unit, or in seconds: `90s`, `30m`, `2h`, `0`.
pub fn duration(text: &str) -> Result<Duration, String> {
    let (number, unit) = text.split_at(text.trim_end_matches(|c: char| c.is_ascii_alphabetic()).len());
    let unit = match unit {
        "s" | "" => 1.0,
        "m" => 60.0,
        "h" => 3600.0,
        _ => return Err("its unit is not s, m or h".into()),
    };
    let seconds = number.parse::<f64>().ok().and_then(|number| Duration::try_from_secs_f64(number * unit).ok());
    // The upper limit keeps sums with an `Instant` from overflowing.
    seconds
        .filter(|seconds| *seconds < Duration::from_secs(u32::MAX.into()))
        .ok_or_else(|| "it is not a duration such as 90s, 30m or 2h".into())
}

/// The address at which a server listens by default.
pub const DEFAULT_HOST: &str = "127.0.0.1";
pub const DEFAULT_PORT: u16 = 5413;

/// An address or a host name. An IPv6 address may have brackets, as in a URL.
pub fn host(text: &str) -> Result<String, String> {
    let bare = text.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(text);
    let is_name = |name: &str| !name.is_empty() && name.chars().all(|c| c.is_alphanumeric() || "-._".contains(c));
    // An interface may follow, as in fe80::1%eth0.
    let (address, interface) = bare.split_once('%').unwrap_or((bare, "any"));
    let is_version6 = address.parse::<Ipv6Addr>().is_ok() && is_name(interface);
    if is_version6 || is_name(text) {
        Ok(text.into())
    } else {
        Err("it is not an address or a host name such as 127.0.0.1, ::1, localhost or, for all addresses, 0.0.0.0; \
             --port sets the port"
            .into())
    }
}

/// An API key. An empty key is an error: it would protect nothing, and an unset variable in a script gives one. So is a
/// key that no header can carry.
pub fn key(text: &str) -> Result<String, String> {
    if text.is_empty() {
        return Err("an empty key protects nothing".into());
    }
    if text.trim() != text || text.contains(char::is_control) {
        return Err(
            "no client can send a key with a line break, another control character, or a space at an end".into()
        );
    }
    Ok(text.into())
}

/// A browser's `Origin`, or `*`.
pub fn origin(text: &str) -> Result<String, String> {
    let host = text.strip_prefix("https://").or_else(|| text.strip_prefix("http://"));
    let fits = host.is_some_and(|host| !host.is_empty() && host.chars().all(|c| c.is_ascii_graphic() && c != '/'));
    if text == "*" || fits {
        Ok(text.into())
    } else {
        Err("it is not an origin such as https://example.com or http://localhost:3000, nor *".into())
    }
}

/// Host names as in URLs, with or without ports, separated by commas.
pub fn hosts_with_ports(text: &str) -> Result<String, String> {
    let without_port = |host: &str| match host.rsplit_once(':') {
        Some((name, port)) if !port.ends_with(']') => port.parse::<u16>().ok().map(|_| name.to_owned()),
        _ => Some(host.to_owned()),
    };
    let names: Option<Vec<String>> = text.split(',').map(without_port).collect();
    match names.map(|names| hosts(&names.join(","))) {
        Some(Ok(_)) => Ok(text.into()),
        _ => Err("it must be names such as images.example.com or localhost:8080, without scheme".into()),
    }
}

/// Host names as in URLs, without ports, separated by commas.
pub fn hosts(text: &str) -> Result<String, String> {
    let fits = |host: &str| {
        let name = !host.is_empty() && host.chars().all(|c| c.is_ascii_alphanumeric() || "-._".contains(c));
        let version6 = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
        name || version6.is_some_and(|host| host.parse::<Ipv6Addr>().is_ok())
    };
    if text.split(',').all(fits) {
        Ok(text.into())
    } else {
        Err("it must be names such as box.lan, without scheme or port".into())
    }
}

/// Kinds of files that `moestro cache` shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum CacheKind {
    #[value(skip)]
    Models,
    /// Unfinished downloads
    Downloads,
    /// Copies of experts that `moestro pack` has made
    Packs,
    /// The prompt cache on disk
    Snapshots,
    /// Compiled GPU kernels
    Kernels,
    Logs,
    /// The unpacked demo, and lists of hot experts
    Other,
}

impl fmt::Display for CacheKind {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&format!("{self:?}").to_lowercase())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_parsed() {
        let good = [
            ("8GiB", 8 << 30),
            ("8G", 8 << 30),
            ("8g", 8 << 30),
            ("8 GiB", 8 << 30),
            ("500M", 500 << 20),
            ("1.5GiB", 3 << 29),
            ("8GB", 8_000_000_000),
            ("2kb", 2000),
            ("1T", 1 << 40),
            ("4194304", 4 << 20),
            ("4096B", 4096),
        ];
        for (text, bytes) in good {
            assert_eq!(size(text), Ok(bytes), "{text}");
        }
        assert_eq!(["0", "off", "1G"].map(size_or_off), [Ok(0), Ok(0), Ok(1 << 30)]);
        assert_eq!(size("8"), Err("8 is 8 bytes; did you mean 8GiB?".into()));
        for text in ["", "G", "8Q", "-8G", "8GG", "0", "8Gib8", "1e9", "99999999T", "nan", "8.5.1G"] {
            assert!(size(text).is_err(), "{text}");
        }
    }

    #[test]
    fn numbers_have_ranges() {
        assert_eq!(count("3"), Ok(3));
        assert!(["0", "-1", "1.5", ""].iter().all(|text| count(text).is_err()));
        assert_eq!((port("0"), port("65535")), (Ok(0), Ok(u16::MAX)));
        for text in ["", "-1", "65536", "x", "99999999999999999999999"] {
            assert_eq!(port(text), Err("it must be a whole number from 0 to 65535".into()));
        }
        assert_eq!(seed("18446744073709551615"), Ok(u64::MAX));
        for text in ["", "-1", "1.5", "18446744073709551616"] {
            let error = seed(text).unwrap_err();
            assert_eq!(error, "it must be a whole number from 0 to 18446744073709551615");
        }
        assert_eq!(probability("0.95"), Ok(0.95));
        assert!(["-0.1", "1.01", "NaN", "x"].iter().all(|text| probability(text).is_err()));
        assert!(["inf", "-1"].iter().all(|text| not_negative(text).is_err()));
        assert!(positive("0").is_err());
        assert_eq!(time_limit("1.5"), Ok(Duration::from_millis(1500)));
        assert_eq!(time_limit("5m"), Ok(Duration::from_secs(300)));
        assert!(["0", "0h", "-1", "nan", "1e300", "5x"].iter().all(|text| time_limit(text).is_err()));
    }

    #[test]
    fn host_names_are_checked() {
        assert!(["box.lan", "192.168.0.2", "[fe80::1],my_box"].iter().all(|text| hosts(text).is_ok()));
        assert!(["", "a,", "http://box", "box:80", "a b", "[box]"].iter().all(|text| hosts(text).is_err()));
    }

    #[test]
    fn addresses_have_no_scheme_and_port() {
        for text in ["127.0.0.1", "::1", "[::1]", "fe80::1%eth0", "::", "localhost", "box_1.lan", "köln.example"] {
            assert_eq!(host(text), Ok(text.into()));
        }
        let bad = [
            "",
            "*",
            "a b",
            "http://box",
            "box:80",
            "127.0.0.1:80",
            "[::1]:80",
            "[box]",
            "/tmp/socket",
            "::1%",
            "::1%a b",
        ];
        assert!(bad.iter().all(|text| host(text).unwrap_err().contains("0.0.0.0")));
    }

    #[test]
    fn hosts_may_have_ports() {
        let good = ["images.example.com", "localhost:8080,[::1]:81", "[fe80::1]"];
        assert!(good.iter().all(|text| hosts_with_ports(text).is_ok()));
        let bad = ["", "http://box", "box:port", "box:80/x", "a,", "box:99999"];
        assert!(bad.iter().all(|text| hosts_with_ports(text).is_err()));
    }

    #[test]
    fn origins_are_checked() {
        assert!(["*", "https://example.com", "http://localhost:3000"].iter().all(|text| origin(text).is_ok()));
        assert!(["", "example.com", "https://", "https://a/b", "ftp://a"].iter().all(|text| origin(text).is_err()));
    }
}

//! `moestro man`: manual pages, with examples, environment variables and files.

use crate::{
    cli::{Cli, help},
    error::CommandError,
};
use clap::CommandFactory;
use clap_mangen::roff::{Roff, bold, roman};
use std::{fs, io, path::Path};

/// Environment variables that have no flag.
const VARIABLES: [(&str, &str); 8] = [
    ("MOESTRO_LOG", "levels of the log by module, such as moestro=debug,warn; overrides --log-level"),
    ("SWIFTLM_TOP_K", "most experts per token, if --experts-per-token is not set"),
    ("HF_TOKEN", "token for gated and private models; else the one that `hf auth login` saved"),
    ("HF_HUB_CACHE, HUGGINGFACE_HUB_CACHE, HF_HOME", "where downloaded models are"),
    ("HF_ENDPOINT", "address of a mirror of the Hugging Face hub"),
    ("HTTPS_PROXY", "proxy for downloads"),
    (
        "XDG_CONFIG_HOME, XDG_DATA_HOME, XDG_CACHE_HOME, XDG_STATE_HOME",
        "used instead of ~/.config and the other directories, also on macOS",
    ),
    ("NO_COLOR", "no colours"),
];

/// Files and directories. [`MACOS_DIRS`] has other names of their parents.
const FILES: [(&str, &str); 8] = [
    ("~/.config/moestro/moestro.toml", "settings; see moestro.toml(5)"),
    ("~/.cache/huggingface/hub", "downloaded models"),
    ("~/.local/share/moestro/models", "your models, NAME or ORG/NAME"),
    ("~/.cache/moestro/packs", "packs"),
    ("~/.cache/moestro/prompts", "the prompt cache on disk"),
    ("~/.local/state/moestro/history", "what was typed in chats"),
    ("~/.local/state/moestro/launch.log", "log of the server that moestro-launch(1) started last"),
    ("~/.local/state/moestro/doctor.json", "figures of the last `moestro doctor --report`"),
];

/// Directories of Linux, and their names on macOS.
const MACOS_DIRS: [(&str, &str); 3] = [
    ("~/.cache/moestro/", "~/Library/Caches/moestro/"),
    ("~/.local/share/moestro/", "~/Library/Application Support/moestro/"),
    ("~/.local/state/moestro/", "~/Library/Application Support/moestro/"),
];

const CONFIG_PAGE: [&str; 6] = [
    "The file has settings by the names of the flags of moestro-serve(1), without the dashes. The command line overrides the \
     environment, and the environment overrides the file.",
    "Strings and sizes are quoted: memory-limit = \"48GiB\". Numbers, true and false are not: port = 5413.",
    "model names the model that is used if the command line names none.",
    "A table [models.NAME] gives a model a name, a path (a directory or a hub id), and settings that override the ones above \
     for this model.",
    "An unknown name is an error that suggests the nearest one. `moestro config` prints all settings with their sources in \
     this format.",
    "SIGHUP makes a server that has no terminal read the file again.",
];

/// Writes `moestro.1`, a page for each subcommand and `moestro.toml.5` into `dir`.
///
/// # Errors
/// The directory cannot be written.
pub fn man(dir: &Path) -> Result<(), CommandError> {
    write_pages(dir).map_err(CommandError::io(dir.display().to_string()))
}

fn write_pages(dir: &Path) -> io::Result<()> {
    fs::create_dir_all(dir)?;
    clap_mangen::generate_to(Cli::command(), dir)?;
    let whole = Cli::command();
    for sub in whole.get_subcommands().filter(|sub| !sub.is_hide_set()) {
        let name = sub.get_name();
        let mut page = Roff::new();
        if let Some((_, text)) = help::COMMAND_EXAMPLES.iter().find(|(command, _)| *command == name) {
            page.control("SH", ["EXAMPLES"]);
            page.control("nf", []).text([roman(*text)]).control("fi", []);
        }
        let variables = sub.get_arguments().filter_map(|arg| Some((arg.get_env()?.to_str()?, arg.get_long()?)));
        let variables: Vec<(String, String)> =
            variables.map(|(variable, flag)| (variable.into(), format!("the same as --{flag}"))).collect();
        add_list(&mut page, "ENVIRONMENT", &variables);
        append(&dir.join(format!("moestro-{name}.1")), &page)?;
    }
    let own = |list: &[(&str, &str)]| -> Vec<(String, String)> {
        list.iter().map(|(name, text)| ((*name).to_owned(), (*text).to_owned())).collect()
    };
    let mut page = Roff::new();
    add_list(&mut page, "ENVIRONMENT", &own(&VARIABLES));
    let mut files = own(&FILES);
    for (linux, macos) in MACOS_DIRS {
        for (path, _) in files.iter_mut().filter(|(path, _)| path.starts_with(linux)) {
            *path = format!("{path}, on macOS {}", path.replace(linux, macos));
        }
    }
    add_list(&mut page, "FILES", &files);
    page.control("SH", ["SEE ALSO"]).text([roman("moestro-serve(1), moestro-run(1), moestro.toml(5)")]);
    append(&dir.join("moestro.1"), &page)?;

    let mut page = Roff::new();
    page.control("TH", ["moestro.toml", "5", "", concat!("moestro ", env!("CARGO_PKG_VERSION"))]);
    page.control("SH", ["NAME"]).text([roman("moestro.toml - settings of moestro")]);
    page.control("SH", ["DESCRIPTION"]);
    for paragraph in CONFIG_PAGE {
        page.control("PP", []).text([roman(paragraph)]);
    }
    add_list(&mut page, "FILES", &own(&FILES[..1]));
    fs::write(dir.join("moestro.toml.5"), page.render())
}

/// Adds a section of names with explanations. Adds nothing if `entries` is empty.
fn add_list(page: &mut Roff, title: &str, entries: &[(String, String)]) {
    if entries.is_empty() {
        return;
    }
    page.control("SH", [title]);
    for (name, text) in entries {
        page.control("TP", []).text([bold(name)]).text([roman(text)]);
    }
}

fn append(path: &Path, page: &Roff) -> io::Result<()> {
    let text = fs::read_to_string(path)? + &page.to_roff();
    fs::write(path, text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_page_has_its_sections() {
        let dir = tempfile::tempdir().unwrap();
        man(dir.path()).unwrap();
        let page = |name: &str| fs::read_to_string(dir.path().join(name)).unwrap();
        for (name, sections) in [
            ("moestro.1", &["ENVIRONMENT", "FILES", "SEE ALSO"][..]),
            ("moestro-serve.1", &["EXAMPLES", "ENVIRONMENT"]),
            ("moestro-info.1", &["EXAMPLES"]),
            ("moestro.toml.5", &["DESCRIPTION", "FILES"]),
        ] {
            let text = page(name);
            assert!(text.contains(".TH"), "{name}");
            for section in sections {
                let heads = [format!(".SH \"{section}\""), format!(".SH {section}\n")];
                assert!(heads.iter().any(|head| text.contains(head)), "{section} in {text}");
            }
        }
        assert!(page("moestro-serve.1").contains("MOESTRO_CTX_SIZE"));
        let files = page("moestro.1").replace("\\-", "-");
        for path in ["~/.cache/moestro/packs, on macOS ~/Library/Caches/moestro/packs", "Support/moestro/doctor.json"] {
            assert!(files.contains(path), "{path} in {files}");
        }
    }
}

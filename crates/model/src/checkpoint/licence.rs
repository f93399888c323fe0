//! Reads the licence from a checkpoint's model card (`README.md`).

use moestro_base::platform::read_small_file;
use std::path::Path;

/// Maximum size of a model card in bytes.
const MAX_BYTES: u64 = 4 << 20;
/// Maximum length of a licence's name in bytes.
const MAX_NAME: usize = 100;

/// The licence of the checkpoint in `dir`, such as `apache-2.0`. If the model card also has a licence name, returns
/// `LICENCE (NAME)`.
pub fn licence(dir: &Path) -> Option<String> {
    let bytes = read_small_file(&dir.join("README.md"), MAX_BYTES).ok()?;
    let text = String::from_utf8_lossy(&bytes);
    let mut lines = text.lines();
    // The fields are in a YAML header between two lines of dashes.
    lines.next().filter(|line| line.trim_end() == "---")?;
    let fields: Vec<&str> = lines.take_while(|line| line.trim_end() != "---").collect();
    let field = |name: &str| {
        let value = fields.iter().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
        let value = value.trim().trim_matches(['"', '\'']);
        let is_name =
            !value.is_empty() && value.len() <= MAX_NAME && value.chars().all(|c| c.is_ascii_graphic() || c == ' ');
        is_name.then_some(value)
    };
    let licence = field("license")?;
    Some(match field("license_name") {
        Some(name) => format!("{licence} ({name})"),
        None => licence.to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn licence_is_read_from_model_card() {
        let dir = tempfile::tempdir().unwrap();
        let read = |text: &str| {
            std::fs::write(dir.path().join("README.md"), text).unwrap();
            licence(dir.path())
        };
        let named = "---\nlanguage:\n- en\nlicense: other\nlicense_name: \"qwen\"\nlicense_link: x\n---\n# Model\n";
        assert_eq!(read(named).as_deref(), Some("other (qwen)"));
        assert_eq!(read("---\r\nlicense: apache-2.0\r\n---\r\n").as_deref(), Some("apache-2.0"));
        assert_eq!(read("---\ntags: [x]\n---\nlicense: mit\n"), None);
        assert_eq!(read("license: mit\n"), None);
        assert_eq!(read("---\nlicense: \u{1b}[31mred\n---\n"), None);
        assert_eq!(licence(&dir.path().join("absent")), None);
    }
}

//! The models on this machine that Moestro can serve: the embedded demo, and the models in the configuration file, in
//! the user's model directory, and in the Hugging Face cache.

use crate::{
    cli::Command,
    config::{self, ModelSource, config_file::Settings},
    demo,
    error::CommandError,
};
use moestro_base::platform::os;
use moestro_model::{checkpoint::hub::Hub, model::config::Config};
use std::{
    env, fs,
    path::{Path, PathBuf},
    time::SystemTime,
};

/// Source of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    Demo,
    Configuration,
    Own,
    Hub,
}

/// A model that can be loaded.
#[derive(Debug, Clone)]
pub struct CatalogEntry {
    /// Name of the model's table in the configuration, `org/name`, or the name of the model's directory.
    pub id: String,
    pub source: ModelSource,
    pub origin: Origin,
    /// `None` for the embedded demo.
    pub dir: Option<PathBuf>,
}

impl CatalogEntry {
    /// Time at which the model was downloaded or created.
    pub fn created(&self) -> SystemTime {
        let path = match &self.dir {
            Some(dir) => dir.join("config.json"),
            None => env::current_exe().unwrap_or_default(),
        };
        fs::metadata(path).and_then(|meta| meta.modified()).unwrap_or(SystemTime::UNIX_EPOCH)
    }

    /// Number of bytes of the model's weight files.
    pub fn bytes(&self) -> u64 {
        let Some(dir) = &self.dir else { return demo::file("model.safetensors").map_or(0, |file| file.len() as u64) };
        let entries = fs::read_dir(dir).into_iter().flatten().flatten();
        let weights = entries.filter(|entry| entry.path().extension().is_some_and(|ending| ending == "safetensors"));
        // `metadata` follows the symbolic links of the hub's cache.
        weights.filter_map(|entry| Some(fs::metadata(entry.path()).ok()?.len())).sum()
    }
}

/// The user's model directory.
pub fn models_dir(flag: Option<&Path>) -> Option<PathBuf> {
    flag.map(config::expand).or_else(|| Some(os::data_dir()?.join("models")))
}

/// All models. If two models have the same name, only the first is listed.
pub fn all(settings: &Settings, own: Option<&Path>) -> Vec<CatalogEntry> {
    let demo = CatalogEntry { id: demo::NAME.into(), source: ModelSource::Demo, origin: Origin::Demo, dir: None };
    let own = models_dir(own).map(|home| find_models(&home)).unwrap_or_default();
    let named = settings.models.iter().filter_map(|(name, place)| {
        let listed = own.iter().find(|(id, _)| id == place && !Path::new(place).exists());
        let source =
            listed.map_or_else(|| ModelSource::new(Some(place)), |(_, dir)| ModelSource::Directory(dir.clone()));
        let dir = match &source {
            ModelSource::Directory(dir) => dir.clone(),
            ModelSource::Hub(id) => Hub::from_env().ok()?.local(id)?,
            ModelSource::Demo => return None,
        };
        Some(CatalogEntry { id: name.clone(), source, origin: Origin::Configuration, dir: Some(dir) })
    });
    let own = own.iter().map(|(id, dir)| {
        let source = ModelSource::Directory(dir.clone());
        CatalogEntry { id: id.clone(), source, origin: Origin::Own, dir: Some(dir.clone()) }
    });
    let hub = Hub::from_env().map(|hub| hub.all()).unwrap_or_default().into_iter().map(|(id, dir)| {
        let source = ModelSource::Hub(id.clone());
        CatalogEntry { id, source, origin: Origin::Hub, dir: Some(dir) }
    });
    let mut entries: Vec<CatalogEntry> = Vec::new();
    for entry in named.chain(own).chain(hub).filter(|entry| entry.dir.as_deref().is_some_and(can_be_served)) {
        if !entries.iter().any(|other| other.id == entry.id) {
            entries.push(entry);
        }
    }
    entries.push(demo);
    entries
}

/// Id of a model on the command line. If the configuration has a name for the model, that name is the id.
pub fn id(source: &ModelSource, settings: &Settings) -> String {
    match (&settings.model, source) {
        (Some(name), _) => name.clone(),
        (None, ModelSource::Demo) => demo::NAME.into(),
        (None, ModelSource::Hub(id)) => id.clone(),
        (None, ModelSource::Directory(dir)) => config::name(dir),
    }
}

/// Resolves the name of a local model on the command line. An existing path takes precedence.
pub fn resolve_name(command: &mut Command, settings: &mut Settings) {
    let own = match command {
        Command::Serve(args) | Command::Config(args) => args.home.models_dir.clone(),
        _ => env::var_os("MOESTRO_MODELS_DIR").map(PathBuf::from),
    };
    let Some(place) = command.model() else { return };
    let Some(name) = place.clone().filter(|name| !Path::new(name).exists()) else { return };
    let mut mine = models_dir(own.as_deref()).map(|home| find_models(&home)).unwrap_or_default().into_iter();
    if name == demo::NAME {
        *place = None;
        settings.model.get_or_insert(name);
    } else if let Some((_, dir)) = mine.find(|(id, _)| *id == name) {
        *place = Some(dir.to_string_lossy().into_owned());
        // A name in the configuration file for this model takes precedence.
        settings.model.get_or_insert(name);
    }
}

/// Hint for the error "no such directory", in case the user meant the name of a model: the most similar name.
pub fn hint(error: &CommandError, settings: &Settings) -> String {
    let CommandError::NoSuchDirectory(path) = error else { return String::new() };
    let name = path.to_string_lossy();
    if name.contains(' ') {
        return "; a prompt follows the model, as in `moestro run moestro-demo \"What is 12+7?\"`".into();
    }
    if config::hub_address(&name).1.is_some() {
        return "; `moestro pull ADDRESS` downloads that revision and prints its directory".into();
    }
    if name.contains('/') {
        return String::new();
    }
    let all = all(settings, None);
    if let Some(entry) = all.iter().find(|entry| entry.id.rsplit('/').next() == Some(&*name)) {
        return format!(" (did you mean {}?)", entry.id);
    }
    let near = config::nearest(&name, all.iter().map(|entry| entry.id.as_str()));
    let otherwise = "; `moestro list` shows the models on this machine; org/name is a model of the Hugging Face hub";
    config::suggestion(near, otherwise)
}

fn can_be_served(dir: &Path) -> bool {
    Config::read(dir).is_ok()
}

/// The models in the directories `NAME` and `ORG/NAME` below `home`. Such a directory has a `config.json`.
fn find_models(home: &Path) -> Vec<(String, PathBuf)> {
    let dirs = |dir: &Path| {
        let entries = fs::read_dir(dir).into_iter().flatten().flatten();
        let dirs = entries.map(|entry| (entry.file_name().to_string_lossy().into_owned(), entry.path()));
        dirs.filter(|(name, path)| !name.starts_with('.') && path.is_dir()).collect::<Vec<_>>()
    };
    let is_model = |dir: &Path| dir.join("config.json").exists();
    let mut found = Vec::new();
    for (name, dir) in dirs(home) {
        if is_model(&dir) {
            found.push((name, dir));
            continue;
        }
        let inner = dirs(&dir).into_iter().filter(|(_, dir)| is_model(dir));
        found.extend(inner.map(|(inner, dir)| (format!("{name}/{inner}"), dir)));
    }
    found.sort();
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_servable_model_is_listed_once() {
        let home = tempfile::tempdir().unwrap();
        let put = |name: &str, config: &[u8]| {
            let dir = home.path().join(name);
            fs::create_dir_all(&dir).unwrap();
            fs::write(dir.join("config.json"), config).unwrap();
            dir
        };
        let config = demo::file("config.json").unwrap();
        let mine = put("mine", config);
        fs::write(mine.join("model.safetensors"), [0; 100]).unwrap();
        put("org/theirs", config);
        put("other", br#"{"model_type": "whisper"}"#);
        put(".hidden", config);
        let place = mine.to_str().unwrap().to_owned();
        let models = vec![("coder".into(), place), ("writer".into(), "org/theirs".into())];
        let settings = Settings { models, ..Settings::default() };
        let found = all(&settings, Some(home.path()));
        let found: Vec<_> = found.iter().filter(|entry| entry.origin != Origin::Hub).collect();
        let ids: Vec<&str> = found.iter().map(|entry| entry.id.as_str()).collect();
        assert_eq!(ids, ["coder", "writer", "mine", "org/theirs", demo::NAME]);
        assert_eq!((found[0].bytes(), found[2].bytes(), found[3].bytes()), (100, 100, 0));
        assert_eq!(found[1].dir, found[3].dir);
        assert!(found[4].bytes() > 1000 && found[0].created() > SystemTime::UNIX_EPOCH);
    }

    #[test]
    fn id_follows_the_command_line() {
        let none = Settings::default();
        assert_eq!(id(&ModelSource::Demo, &none), demo::NAME);
        assert_eq!(id(&ModelSource::Hub("org/name".into()), &none), "org/name");
        assert_eq!(id(&ModelSource::Directory("/models/x".into()), &none), "x");
        let named = Settings { model: Some("coder".into()), ..Settings::default() };
        assert_eq!(id(&ModelSource::Directory("/models/x".into()), &named), "coder");
    }
}

//! Settings that make each coding agent use a local server: variables, arguments, and separate files. These settings
//! never change the user's own configuration of an agent.

use crate::cli::values::Agent;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// API key for a server that requires no key. Agents refuse to start without a key.
const ANY_KEY: &str = "local";
/// Milliseconds without an event after which Claude Code gives up. Half an hour, because long prompts take long.
const CLAUDE_IDLE_MS: &str = "1800000";
/// The extension of pi that adds a provider: what comes before and after the JSON of the provider.
const PI_EXTENSION: [&str; 2] = [
    "export default (pi) => pi.registerProvider(\"moestro\", {\n...",
    ",\napiKey: process.env.MOESTRO_API_KEY,\n});\n",
];

/// The server and the model that an agent uses.
#[derive(Debug, Clone, Default)]
pub struct AgentTarget {
    /// Address of the server, without `/v1`.
    pub base_url: String,
    pub key: Option<String>,
    pub model: String,
    pub context: usize,
    pub has_vision: bool,
    pub reasons: bool,
}

/// The files to write and the command to run for an agent.
#[derive(Debug, Default)]
pub struct AgentSetup {
    pub program: &'static str,
    /// Command that installs the agent.
    pub install: &'static str,
    pub variables: Vec<(&'static str, String)>,
    /// Environment variables to remove, because they would override `variables`.
    pub removed: &'static [&'static str],
    /// Arguments that come before the arguments of the user.
    pub args: Vec<String>,
    pub files: Vec<(PathBuf, String)>,
    /// Flags of `serve` that help this agent.
    pub server_flags: &'static [&'static str],
}

impl AgentTarget {
    /// Maximum number of tokens of an answer: a quarter of the context.
    fn output(&self) -> usize {
        (self.context / 4).clamp(256, 32_000)
    }

    /// The kinds of input that the model reads.
    fn inputs(&self) -> Vec<&'static str> {
        if self.has_vision { vec!["text", "image"] } else { vec!["text"] }
    }

    fn key(&self) -> String {
        self.key.clone().unwrap_or_else(|| ANY_KEY.into())
    }

    /// Address of the OpenAI API of the server.
    fn openai_url(&self) -> String {
        format!("{}/v1", self.base_url)
    }

    /// The setup of an agent. The agent's files are in `dir`.
    pub fn setup(&self, agent: Agent, dir: &Path) -> AgentSetup {
        match agent {
            Agent::Claude => self.claude(),
            Agent::Codex => self.codex(),
            Agent::Opencode => self.opencode(dir),
            Agent::Qwen => self.qwen(),
            Agent::Aider => self.aider(dir),
            Agent::Copilot => self.copilot(),
            Agent::Pi => self.pi(dir),
            Agent::Continue => self.continue_cli(dir),
        }
    }

    fn claude(&self) -> AgentSetup {
        let model = |name| (name, self.model.clone());
        AgentSetup {
            program: "claude",
            install: "npm install -g @anthropic-ai/claude-code",
            variables: vec![
                ("ANTHROPIC_BASE_URL", self.base_url.clone()),
                ("ANTHROPIC_AUTH_TOKEN", self.key()),
                model("ANTHROPIC_MODEL"),
                model("ANTHROPIC_DEFAULT_OPUS_MODEL"),
                model("ANTHROPIC_DEFAULT_SONNET_MODEL"),
                model("ANTHROPIC_DEFAULT_HAIKU_MODEL"),
                model("CLAUDE_CODE_SUBAGENT_MODEL"),
                ("CLAUDE_CODE_MAX_CONTEXT_TOKENS", self.context.to_string()),
                ("CLAUDE_CODE_MAX_OUTPUT_TOKENS", self.output().to_string()),
                ("CLAUDE_STREAM_IDLE_TIMEOUT_MS", CLAUDE_IDLE_MS.into()),
                ("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "1".into()),
                // The first prompt has only the tools that most turns need. The definition of another tool is written
                // where Claude Code has found the tool, so the start of the prompt stays in the cache.
                ("ENABLE_TOOL_SEARCH", "true".into()),
            ],
            removed: &["ANTHROPIC_API_KEY"],
            ..AgentSetup::default()
        }
    }

    fn codex(&self) -> AgentSetup {
        let text = |text: &str| toml::Value::from(text).to_string();
        let provider = format!(
            "model_providers.moestro={{ name = \"Moestro\", base_url = {}, wire_api = \"responses\", env_key = \
             \"MOESTRO_API_KEY\" }}",
            text(&self.openai_url())
        );
        let settings = [
            "model_provider=\"moestro\"".to_owned(),
            provider,
            format!("model={}", text(&self.model)),
            format!("model_context_window={}", self.context),
        ];
        AgentSetup {
            program: "codex",
            install: "npm install -g @openai/codex",
            variables: vec![("MOESTRO_API_KEY", self.key())],
            args: settings.into_iter().flat_map(|setting| ["-c".to_owned(), setting]).collect(),
            // Codex sends no tools when it asks for a summary of a long conversation.
            server_flags: &["--reuse-tools"],
            ..AgentSetup::default()
        }
    }

    fn opencode(&self, dir: &Path) -> AgentSetup {
        let model = json!({
            "name": self.model,
            "tool_call": true,
            "reasoning": self.reasons,
            "attachment": self.has_vision,
            "modalities": {"input": self.inputs(), "output": ["text"]},
            "limit": {"context": self.context, "output": self.output()},
        });
        let config = json!({
            "$schema": "https://opencode.ai/config.json",
            "model": format!("moestro/{}", self.model),
            "small_model": format!("moestro/{}", self.model),
            "provider": {"moestro": {
                "npm": "@ai-sdk/openai-compatible",
                "name": "Moestro",
                "options": {"baseURL": self.openai_url(), "apiKey": "{env:MOESTRO_API_KEY}"},
                "models": {self.model.clone(): model},
            }},
        });
        let file = dir.join("opencode.json");
        AgentSetup {
            program: "opencode",
            install: "npm install -g opencode-ai",
            variables: vec![("OPENCODE_CONFIG", file.display().to_string()), ("MOESTRO_API_KEY", self.key())],
            files: vec![(file, pretty(&config))],
            ..AgentSetup::default()
        }
    }

    fn qwen(&self) -> AgentSetup {
        AgentSetup {
            program: "qwen",
            install: "npm install -g @qwen-code/qwen-code",
            variables: vec![
                ("OPENAI_BASE_URL", self.openai_url()),
                ("OPENAI_API_KEY", self.key()),
                ("OPENAI_MODEL", self.model.clone()),
            ],
            args: vec!["--auth-type".into(), "openai".into(), "--model".into(), self.model.clone()],
            ..AgentSetup::default()
        }
    }

    fn aider(&self, dir: &Path) -> AgentSetup {
        let name = format!("openai/{}", self.model);
        let metadata = json!({name.clone(): {
            "max_tokens": self.output(),
            "max_input_tokens": self.context,
            "max_output_tokens": self.output(),
            "input_cost_per_token": 0.0,
            "output_cost_per_token": 0.0,
            "litellm_provider": "openai",
            "mode": "chat",
            "supports_vision": self.has_vision,
        }});
        let file = dir.join("aider.json");
        AgentSetup {
            program: "aider",
            install: "python3 -m pip install aider-install && aider-install",
            variables: vec![("OPENAI_API_BASE", self.openai_url()), ("OPENAI_API_KEY", self.key())],
            args: vec!["--model".into(), name, "--model-metadata-file".into(), file.display().to_string()],
            files: vec![(file, pretty(&metadata))],
            ..AgentSetup::default()
        }
    }

    /// Copilot CLI has no setting for images or reasoning of a provider's model.
    fn copilot(&self) -> AgentSetup {
        AgentSetup {
            program: "copilot",
            install: "npm install -g @github/copilot",
            variables: vec![
                ("COPILOT_PROVIDER_BASE_URL", self.openai_url()),
                ("COPILOT_PROVIDER_TYPE", "openai".into()),
                ("COPILOT_PROVIDER_WIRE_API", "completions".into()),
                ("COPILOT_PROVIDER_API_KEY", self.key()),
                ("COPILOT_MODEL", self.model.clone()),
                ("COPILOT_PROVIDER_MAX_PROMPT_TOKENS", self.context.saturating_sub(self.output()).to_string()),
                ("COPILOT_PROVIDER_MAX_OUTPUT_TOKENS", self.output().to_string()),
            ],
            removed: &[
                "COPILOT_PROVIDER_API_KEY_COMMAND",
                "COPILOT_PROVIDER_BEARER_TOKEN",
                "COPILOT_PROVIDER_MODEL_ID",
                "COPILOT_PROVIDER_TRANSPORT",
                "COPILOT_PROVIDER_WIRE_MODEL",
            ],
            ..AgentSetup::default()
        }
    }

    /// pi reads providers from a file among the user's own settings. An extension adds one without changing that file.
    fn pi(&self, dir: &Path) -> AgentSetup {
        let mut model = json!({
            "id": self.model,
            "name": self.model,
            "reasoning": self.reasons,
            "input": self.inputs(),
            "contextWindow": self.context,
            "maxTokens": self.output(),
            "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
        });
        if self.reasons {
            // pi then sends `enable_thinking`. Otherwise it cannot switch reasoning off.
            model["compat"] = json!({"thinkingFormat": "qwen"});
        }
        let provider = json!({"baseUrl": self.openai_url(), "api": "openai-completions", "models": [model]});
        let file = dir.join("pi.js");
        let [before, after] = PI_EXTENSION;
        let text = format!("{before}{provider:#}{after}");
        let words = ["--extension", &file.display().to_string(), "--provider", "moestro", "--model", &self.model];
        AgentSetup {
            program: "pi",
            install: "npm install -g @earendil-works/pi-coding-agent",
            variables: vec![("MOESTRO_API_KEY", self.key())],
            args: words.map(str::to_owned).into(),
            files: vec![(file, text)],
            ..AgentSetup::default()
        }
    }

    /// The file is JSON, which YAML includes. Continue has no setting for the reasoning of a model.
    fn continue_cli(&self, dir: &Path) -> AgentSetup {
        let mut capabilities = vec!["tool_use"];
        capabilities.extend(self.has_vision.then_some("image_input"));
        let model = json!({
            "name": self.model,
            "provider": "openai",
            "model": self.model,
            "apiBase": self.openai_url(),
            "apiKey": "${{ secrets.MOESTRO_API_KEY }}",
            "roles": ["chat", "edit", "apply", "summarize"],
            "capabilities": capabilities,
            "defaultCompletionOptions": {"contextLength": self.context, "maxTokens": self.output()},
        });
        let config = json!({"name": "Moestro", "version": "1.0.0", "schema": "v1", "models": [model]});
        let file = dir.join("continue.yaml");
        AgentSetup {
            program: "cn",
            install: "npm install -g @continuedev/cli",
            variables: vec![("MOESTRO_API_KEY", self.key())],
            args: vec!["--config".into(), file.display().to_string()],
            files: vec![(file, pretty(&config))],
            ..AgentSetup::default()
        }
    }
}

fn pretty(value: &Value) -> String {
    format!("{value:#}\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::ValueEnum;

    /// The JSON in a file of an agent.
    fn json_in(text: &str) -> Value {
        let [before, after] = PI_EXTENSION;
        let text = text.strip_prefix(before).map_or(text, |text| text.strip_suffix(after).unwrap());
        serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"))
    }

    fn target() -> AgentTarget {
        AgentTarget {
            base_url: "http://127.0.0.1:7".into(),
            key: Some("hidden-key".into()),
            model: "org/na\"me".into(),
            context: 65_536,
            has_vision: true,
            reasons: true,
        }
    }

    #[test]
    fn every_agent_gets_address_model_and_context() {
        let target = target();
        for agent in Agent::value_variants() {
            let setup = target.setup(*agent, Path::new("/d"));
            let all = format!("{:?} {:?} {:?}", setup.variables, setup.args, setup.files);
            assert!(all.contains("http://127.0.0.1:7") && all.contains("org/na"), "{agent:?}: {all}");
            // Qwen Code has no variable for the context length. Copilot CLI takes the two parts of it.
            let has_context = all.contains("65536") || all.contains("49152") && all.contains("16384");
            assert!(*agent == Agent::Qwen || has_context, "{agent:?}: {all}");
            assert!(setup.variables.iter().any(|(_, value)| value == "hidden-key"), "{agent:?}");
            for (_, text) in &setup.files {
                json_in(text);
                assert!(!text.contains("hidden-key"), "{agent:?}");
            }
        }
        let claude = target.setup(Agent::Claude, Path::new("/d"));
        assert!(claude.variables.contains(&("ENABLE_TOOL_SEARCH", "true".into())));
        // Codex parses the value of -c as TOML.
        let codex = target.setup(Agent::Codex, Path::new("/d"));
        for setting in codex.args.iter().filter(|arg| *arg != "-c") {
            setting.parse::<toml::Table>().unwrap_or_else(|error| panic!("{setting}: {error}"));
        }
        let opencode = target.setup(Agent::Opencode, Path::new("/d"));
        let config: Value = serde_json::from_str(&opencode.files[0].1).unwrap();
        let model = &config["provider"]["moestro"]["models"]["org/na\"me"];
        assert_eq!(model["limit"]["context"], 65_536);
        assert_eq!(model["modalities"]["input"], json!(["text", "image"]));
    }

    #[test]
    fn image_and_reasoning_settings_follow_the_model() {
        let file = |agent, target: &AgentTarget| json_in(&target.setup(agent, Path::new("/d")).files[0].1);
        let able = target();
        let plain = AgentTarget { has_vision: false, reasons: false, ..target() };
        let pi = |target| file(Agent::Pi, target)["models"][0].clone();
        let model = pi(&able);
        assert_eq!((&model["input"], &model["reasoning"]), (&json!(["text", "image"]), &json!(true)));
        assert_eq!((&model["compat"]["thinkingFormat"], &model["maxTokens"]), (&json!("qwen"), &json!(16_384)));
        let model = pi(&plain);
        assert_eq!((&model["input"], &model["reasoning"]), (&json!(["text"]), &json!(false)));
        let capabilities = |target| file(Agent::Continue, target)["models"][0]["capabilities"].clone();
        assert_eq!(capabilities(&able), json!(["tool_use", "image_input"]));
        assert_eq!(capabilities(&plain), json!(["tool_use"]));
    }
}

//! `moestro ps` and `stop`: show or unload the model of a running server.

use super::{
    api_client::ApiClient,
    text::{print, print_line, table},
};
use crate::{cli, error::CommandError};
use moestro_model::plan::Size;
use serde_json::Value;

/// Prints the loaded model and the load of the server, or that no model is loaded.
pub fn ps(args: &cli::PsArgs) -> Result<(), CommandError> {
    let health = ApiClient::remote(&args.remote)?.state()?;
    print(report(&health));
    Ok(())
}

fn report(health: &Value) -> String {
    let Some(model) = health["model"].as_str() else {
        return match health["status"].as_str() {
            Some("ok") => "no model is in memory; the next request loads one\n".into(),
            status => format!("no model is in memory: {}\n", status.unwrap_or("unknown status")),
        };
    };
    let size = |bytes: &Value| bytes.as_u64().map_or("?".into(), |bytes| Size(bytes).to_string());
    let plan = &health["plan"];
    let requests = &health["requests"];
    let row = [
        model.to_owned(),
        health["quantization"].as_str().unwrap_or("?").split(',').next().unwrap_or_default().to_owned(),
        size(&health["memory"]["used"]),
        size(&plan["reserved"]),
        plan["device"].as_str().unwrap_or("?").to_owned(),
        health["context"].to_string(),
        format!("{} running, {} waiting", requests["running"], requests["queued"]),
    ];
    table(["NAME", "FORMAT", "USED", "RESERVED", "DEVICE", "CONTEXT", "REQUESTS"], &[row])
}

/// Makes the server unload a model. The next request loads the model again.
pub fn stop(args: &cli::StopArgs) -> Result<(), CommandError> {
    let server = ApiClient::remote(&args.remote)?;
    let name = match &args.name {
        Some(name) => name.clone(),
        None => match server.state()?["model"].as_str() {
            Some(loaded) => loaded.to_owned(),
            None => {
                print_line("no model is in memory");
                return Ok(());
            }
        },
    };
    server.unload(&name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn loaded_model_is_one_row() {
        let health = json!({"status": "ok", "model": "x", "context": 4096, "quantization": "4-bit affine, groups of 64",
            "requests": {"running": 1, "queued": 2}, "memory": {"used": 60 << 20},
            "plan": {"reserved": 3u64 << 29, "device": "cpu", "limit": 7}});
        let text = report(&health);
        let (header, row) = text.split_once('\n').unwrap();
        assert!(header.starts_with("NAME  FORMAT        USED      RESERVED"), "{text}");
        assert_eq!(row, "x     4-bit affine  60.0 MiB  1.50 GiB  cpu     4096     1 running, 2 waiting\n");
        assert!(report(&json!({"status": "ok", "model": null})).contains("the next request"));
        assert_eq!(report(&json!({"status": "loading"})), "no model is in memory: loading\n");
    }
}

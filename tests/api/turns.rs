//! Tests of the order in which waiting requests of several users run.

use super::server::{COMPLETIONS, MESSAGES, RESPONSES, Server, Setup, chat, with};
use serde_json::{Value, json};
use std::sync::Arc;
use tokio::sync::mpsc::unbounded_channel;

fn body(path: &str, user: &str, text: &str) -> Value {
    match path {
        MESSAGES => with(chat(text), json!({"max_tokens": 400, "metadata": {"user_id": user}})),
        RESPONSES => json!({"input": text, "user": user}),
        _ => json!({"prompt": text, "max_tokens": 400, "user": user}),
    }
}

#[tokio::test]
async fn waiting_users_take_turns() {
    for path in [COMPLETIONS, RESPONSES, MESSAGES] {
        let setup = Setup { stops_at: 0, says: Some("</think>\n\none two three"), ..Setup::default() };
        let server: Arc<Server> = Arc::new(setup.start().await);
        let (sender, mut ended) = unbounded_channel();
        let ask = |user: &'static str, text: String| {
            let (server, sender) = (server.clone(), sender.clone());
            tokio::spawn(async move {
                server.ask(path, &body(path, user, &text)).await;
                let _ = sender.send(user);
            })
        };
        ask("ann", "word ".repeat(30));
        server.load(1, 0).await;
        for (waiting, user) in ["ann", "ann", "bob", "ann"].into_iter().enumerate() {
            ask(user, "Hi.".into());
            server.load(1, waiting + 1).await;
        }
        for (left, user) in [(3, "ann"), (2, "bob"), (1, "ann")] {
            server.load_after_steps(1, left).await;
            assert_eq!(ended.recv().await, Some(user), "{path}");
        }
        server.resume();
        server.idle().await;
    }
}

//! Words for a POSIX shell.

/// The word in quotes, so that the shell takes it as it is.
pub(crate) fn quote(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_survive_the_shell() {
        for word in ["plain", "two words", "it's", "$HOME `x` \"q\" \\"] {
            let mut command = std::process::Command::new("sh");
            let output = crate::exec::capture(command.args(["-c", &format!("printf %s {}", quote(word))]));
            assert_eq!(output.unwrap(), word);
        }
    }
}

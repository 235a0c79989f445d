//! What people copy is right: every policy of `policies/`, and every example of `docs/policy.md` and `docs/config.md` with
//! the messages shown there.
#![allow(clippy::unwrap_used, reason = "test code")]

use std::{
    fs,
    path::{Path, PathBuf},
};

use smc_policy::{
    kernel::record,
    policy::{
        Config, Loaded, Settings, Slots, SourceFile, compile,
        config::{Parsed, parse},
        load, render, run_tests,
    },
};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Everything that `check` would print about a policy; empty: nothing is wrong with it.
fn said(files: &[SourceFile]) -> String {
    match load(files, record::now()) {
        Ok(Loaded { policy, warnings }) => {
            if let Err(error) = compile(&policy, &Slots::in_order(&policy), &Settings::default()) {
                return error.to_string();
            }
            render(&[warnings, run_tests(&policy)].concat(), files, false)
        }
        Err(errors) => render(&errors, files, false),
    }
}

#[test]
fn policies_to_copy_hold_their_own_tests_without_a_warning() {
    let mut checked = 0;
    for entry in fs::read_dir(root().join("policies")).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|extension| extension != "toml") {
            continue;
        }
        let files = [SourceFile::policy(&path, fs::read_to_string(&path).unwrap())];
        assert_eq!(said(&files), "");
        let policy = load(&files, record::now()).unwrap().policy;
        let named = |name: &str| policy.tests.iter().any(|test| test.rule.as_deref() == Some(name));
        for rule in &policy.rules {
            assert!(named(&rule.name), "{}: no test names rule {}", files[0].path.display(), rule.name);
        }
        checked += 1;
    }
    assert!(checked >= 3, "{checked} policies");
}

/// The fenced blocks of a text: their first line after the fence, and their lines.
fn blocks(text: &str) -> Vec<(&str, String)> {
    let mut blocks: Vec<(&str, String)> = Vec::new();
    let mut open = false;
    for line in text.lines() {
        match (line.strip_prefix("```"), blocks.last_mut()) {
            (Some(info), _) if !open => blocks.push((info, String::new())),
            (None, Some((_, block))) if open => {
                block.push_str(line);
                block.push('\n');
            }
            _ => {}
        }
        open ^= line.starts_with("```");
    }
    blocks
}

#[test]
fn examples_of_the_language_reference_are_as_it_says() {
    let (right, wrong) = check_examples("docs/policy.md", "web.toml", said);
    assert!(right >= 4 && wrong >= 3, "{right} right, {wrong} wrong");
}

/// A policy with its list: the block after it, whose first line says which file it is.
#[test]
fn the_example_of_a_list_is_right() {
    let text = fs::read_to_string(root().join("docs/policy.md")).unwrap();
    let blocks = blocks(&text);
    let at = blocks.iter().position(|(info, _)| *info == "toml,files").unwrap();
    let (policy, list) = (&blocks[at].1, &blocks[at + 1].1);
    let (path, _) = list.trim_start_matches("# ").split_once(':').unwrap();
    let files = [SourceFile::policy("web.toml", policy), SourceFile::list(path, list)];
    assert_eq!(said(&files), "");
    let policy = load(&files, record::now()).unwrap().policy;
    assert_eq!(policy.rules[0].peers.as_ref().unwrap().len(), 3);
}

#[test]
fn examples_of_the_readme_are_policies() {
    let (right, _) = check_examples("README.md", "web.toml", said);
    assert!(right >= 1, "{right} right");
}

/// Everything that `check` would print about a config.toml.
fn said_of_config(files: &[SourceFile]) -> String {
    let found = parse(0, &files[0].text).map(|parsed| parsed.warnings).unwrap_or_else(|found| found);
    render(&found, files, false)
}

#[test]
fn examples_of_the_configuration_are_as_it_says() {
    let (right, wrong) = check_examples("docs/config.md", "config.toml", said_of_config);
    assert!(right >= 6 && wrong >= 2, "{right} right, {wrong} wrong");
}

#[test]
fn the_defaults_of_the_configuration_are_as_it_says() {
    let document = fs::read_to_string(root().join("docs/config.md")).unwrap();
    let blocks = blocks(&document);
    let (_, first) = blocks.iter().find(|(info, _)| *info == "toml").unwrap();
    assert_eq!(parse(0, first).unwrap().config, Config::default());
    // What is commented out there can be used as well.
    let whole: String = first
        .lines()
        .map(|line| match line.strip_prefix("# ") {
            Some(key) => format!("{key}\n"),
            None => format!("{line}\n"),
        })
        .collect();
    let Parsed { config, warnings } = parse(0, &whole).unwrap();
    assert_eq!((config.interfaces.include.len(), config.magics.len(), warnings.len()), (1, 1, 0));
}

/// Checks every example of a document: how many are right, and how many are wrong as the document says.
fn check_examples(document: &str, path: &str, said: fn(&[SourceFile]) -> String) -> (usize, usize) {
    let text = fs::read_to_string(root().join(document)).unwrap();
    let blocks = blocks(&text);
    let (mut right, mut wrong) = (0, 0);
    for (at, (info, text)) in blocks.iter().enumerate() {
        let files = [SourceFile::policy(path, text.clone())];
        match *info {
            "toml" => {
                assert_eq!(said(&files), "", "{text}");
                right += 1;
            }
            "toml,error" => {
                let (info, expected) = &blocks[at + 1];
                assert_eq!((*info, said(&files).trim_end()), ("text", expected.trim_end()), "{text}");
                wrong += 1;
            }
            _ => {}
        }
    }
    (right, wrong)
}

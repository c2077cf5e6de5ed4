//! Puts the plugin into a node's CNI configuration, and takes it out again.

use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use penstock_admin::client::DEFAULT_CNI_SOCKET;
use serde_json::{Value, json};

use crate::plugin::WAIT;
use crate::{Installation, Places};

/// Name of the program and of its entry in a chain.
const NAME: &str = "penstock-cni";

#[derive(Debug, thiserror::Error)]
pub(crate) enum ConflistError {
    #[error("{}: {source}", .path.display())]
    File { path: PathBuf, source: io::Error },
    #[error("{}: no CNI configuration is there yet: install the cluster's network plugin first", .0.display())]
    None(PathBuf),
    #[error("{}: one plugin and no chain: write it as a list of plugins, as NAME.conflist", .0.display())]
    NoChain(PathBuf),
    #[error("{}: {problem}", .path.display())]
    Invalid { path: PathBuf, problem: String },
}

/// Copies this program to the plugins, and lists it last in the chain that the runtime uses. Returns what was done, a line each.
pub(crate) fn install(installation: &Installation) -> Result<Vec<String>, ConflistError> {
    let Places { bin_dir, conf_dir } = &installation.places;
    let path = used(conf_dir)?;
    let mut chain = read(&path)?;
    // The program first: a chain that names a missing one starts no pod.
    let program = bin_dir.join(NAME);
    let own = std::env::current_exe().and_then(fs::read);
    let own = own.map_err(|source| ConflistError::File { path: "/proc/self/exe".into(), source })?;
    replace(&program, &own, 0o755)?;
    let mut done = vec![format!("{}: installed", program.display())];
    if !without(&mut chain) {
        done.push(format!("{}: appended {NAME} to its plugins", path.display()));
    }
    plugins(&mut chain, &path)?.push(entry(installation));
    save(&path, &chain)?;
    Ok(done)
}

/// The plugin's entry in a chain, with the settings that are not the default.
fn entry(installation: &Installation) -> Value {
    let mut entry = json!({ "type": NAME });
    if installation.wait_seconds != WAIT {
        entry["waitSeconds"] = installation.wait_seconds.into();
    }
    if installation.socket != Path::new(DEFAULT_CNI_SOCKET) {
        entry["socket"] = installation.socket.to_string_lossy().into();
    }
    entry
}

/// Takes the plugin out of every chain of `conf_dir`, then removes the program. Returns what was done, a line each.
pub(crate) fn uninstall(bin_dir: &Path, conf_dir: &Path) -> Result<Vec<String>, ConflistError> {
    let mut done = Vec::new();
    for path in configurations(conf_dir)? {
        // Others' files that are no JSON do not name it.
        let Ok(mut chain) = read(&path) else { continue };
        if without(&mut chain) {
            save(&path, &chain)?;
            done.push(format!("{}: {NAME} removed from its plugins", path.display()));
        }
    }
    let program = bin_dir.join(NAME);
    match fs::remove_file(&program) {
        Ok(()) => done.push(format!("{}: removed", program.display())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(source) => return Err(ConflistError::File { path: program, source }),
    }
    Ok(done)
}

/// The configuration that containerd and CRI-O use: the first one by name.
fn used(directory: &Path) -> Result<PathBuf, ConflistError> {
    let first = configurations(directory)?.into_iter().next();
    let first = first.ok_or_else(|| ConflistError::None(directory.to_owned()))?;
    match first.extension().is_some_and(|extension| extension == "conflist") {
        true => Ok(first),
        false => Err(ConflistError::NoChain(first)),
    }
}

/// The files that libcni reads (`ConfFiles` in libcni/conf.go), sorted.
fn configurations(directory: &Path) -> Result<Vec<PathBuf>, ConflistError> {
    let entries = fs::read_dir(directory);
    let entries = entries.map_err(|source| ConflistError::File { path: directory.to_owned(), source })?;
    let is_configuration = |path: &PathBuf| {
        path.extension().is_some_and(|extension| ["conf", "conflist", "json"].iter().any(|known| extension == *known))
    };
    let mut found: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).filter(is_configuration).collect();
    found.sort();
    Ok(found)
}

fn read(path: &Path) -> Result<Value, ConflistError> {
    let text = fs::read(path).map_err(|source| ConflistError::File { path: path.to_owned(), source })?;
    serde_json::from_slice(&text)
        .map_err(|error| ConflistError::Invalid { path: path.to_owned(), problem: error.to_string() })
}

fn plugins<'a>(chain: &'a mut Value, path: &Path) -> Result<&'a mut Vec<Value>, ConflistError> {
    let plugins = chain.get_mut("plugins").and_then(Value::as_array_mut).filter(|plugins| !plugins.is_empty());
    plugins.ok_or_else(|| ConflistError::Invalid { path: path.to_owned(), problem: "it lists no plugins".to_owned() })
}

/// Removes the plugin from a chain; returns whether it was there.
fn without(chain: &mut Value) -> bool {
    let Some(plugins) = chain.get_mut("plugins").and_then(Value::as_array_mut) else { return false };
    let before = plugins.len();
    plugins.retain(|plugin| plugin["type"] != NAME);
    plugins.len() < before
}

fn save(path: &Path, chain: &Value) -> Result<(), ConflistError> {
    let mode = fs::metadata(path).map_or(0o600, |found| found.permissions().mode());
    let mut text = serde_json::to_vec_pretty(chain)
        .map_err(|error| ConflistError::Invalid { path: path.to_owned(), problem: error.to_string() })?;
    text.push(b'\n');
    replace(path, &text, mode)
}

/// Replaces a file by one rename, so that the runtime reads the old or the new one. The new file's name is none that a runtime
/// reads.
fn replace(path: &Path, content: &[u8], mode: u32) -> Result<(), ConflistError> {
    let replace = || -> io::Result<()> {
        let directory = path.parent().unwrap_or(Path::new("."));
        let mut new = tempfile::Builder::new().prefix(".penstock-").suffix(".new").tempfile_in(directory)?;
        new.write_all(content)?;
        new.as_file().set_permissions(fs::Permissions::from_mode(mode))?;
        new.as_file().sync_all()?;
        new.persist(path)?;
        Ok(())
    };
    replace().map_err(|source| ConflistError::File { path: path.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(files: &[(&str, &str)]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        files.iter().for_each(|(name, text)| fs::write(folder.path().join(name), text).unwrap());
        folder
    }

    fn installation(bin_dir: &Path, conf_dir: &Path) -> Installation {
        let places = Places { bin_dir: bin_dir.to_owned(), conf_dir: conf_dir.to_owned() };
        Installation { places, wait_seconds: WAIT, socket: DEFAULT_CNI_SOCKET.into() }
    }

    fn install(bin_dir: &Path, conf_dir: &Path) -> Result<Vec<String>, ConflistError> {
        super::install(&installation(bin_dir, conf_dir))
    }

    fn types(path: &Path) -> Vec<String> {
        let chain = read(path).unwrap();
        chain["plugins"].as_array().unwrap().iter().map(|plugin| plugin["type"].as_str().unwrap().to_owned()).collect()
    }

    const PTP: &str =
        r#"{"cniVersion":"1.0.0","name":"pods","plugins":[{"type":"ptp","mtu":1500},{"type":"portmap"}]}"#;

    #[test]
    fn the_plugin_is_last_and_once_in_the_runtimes_chain() {
        let (bin, conf) =
            (folder(&[]), folder(&[("10-pods.conflist", PTP), ("20-other.conflist", PTP), ("README", "")]));
        for _ in 0..2 {
            install(bin.path(), conf.path()).unwrap();
            assert_eq!(types(&conf.path().join("10-pods.conflist")), ["ptp", "portmap", NAME]);
            assert_eq!(types(&conf.path().join("20-other.conflist")), ["ptp", "portmap"]);
        }
        let chain = read(&conf.path().join("10-pods.conflist")).unwrap();
        assert_eq!((&chain["plugins"][0]["mtu"], &chain["name"]), (&json!(1500), &json!("pods")));
        let mode = fs::metadata(bin.path().join(NAME)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o755);
        assert_eq!(fs::read_dir(conf.path()).unwrap().count(), 3, "no other file is left");
    }

    #[test]
    fn settings_other_than_the_default_stand_in_its_entry() {
        let (bin, conf) = (folder(&[]), folder(&[("10-pods.conflist", PTP)]));
        let last = || read(&conf.path().join("10-pods.conflist")).unwrap()["plugins"][2].clone();
        let default = installation(bin.path(), conf.path());
        super::install(&default).unwrap();
        assert_eq!(last(), json!({ "type": NAME }));
        super::install(&Installation { wait_seconds: 0, socket: "/run/other.cni".into(), ..default }).unwrap();
        assert_eq!(last(), json!({ "type": NAME, "waitSeconds": 0, "socket": "/run/other.cni" }));
    }

    #[test]
    fn uninstall_leaves_what_was_before() {
        let (bin, conf) = (folder(&[]), folder(&[("10-pods.conflist", PTP), ("99-broken.conf", "{")]));
        let before = read(&conf.path().join("10-pods.conflist")).unwrap();
        install(bin.path(), conf.path()).unwrap();
        assert_eq!(uninstall(bin.path(), conf.path()).unwrap().len(), 2);
        assert_eq!(read(&conf.path().join("10-pods.conflist")).unwrap(), before);
        assert_eq!(fs::read_dir(bin.path()).unwrap().count(), 0);
        assert_eq!(uninstall(bin.path(), conf.path()).unwrap(), Vec::<String>::new(), "a second time there is nothing");
    }

    #[test]
    fn what_cannot_be_changed_is_named_and_left_as_it_is() {
        for (files, said) in [
            (vec![], "no CNI configuration is there yet"),
            (vec![("10-pods.conf", r#"{"type":"ptp"}"#)], "one plugin and no chain"),
            (vec![("10-pods.conflist", "{\"plugins\":")], "10-pods.conflist: EOF"),
            (vec![("10-pods.conflist", r#"{"plugins":[]}"#)], "it lists no plugins"),
        ] {
            let (bin, conf) = (folder(&[]), folder(&files));
            let error = install(bin.path(), conf.path()).unwrap_err().to_string();
            assert!(error.contains(said), "{error}");
            for (name, text) in files {
                assert_eq!(fs::read_to_string(conf.path().join(name)).unwrap(), text);
            }
        }
        let error = install(Path::new("/nowhere"), folder(&[("a.conflist", PTP)]).path()).unwrap_err().to_string();
        assert!(error.contains("/nowhere"), "{error}");
    }
}

//! The dashboard in headless Chromium, at the width of a screen and of a phone, light and dark. Skipped where there is none, installed or fetched.
//!
//! Chromium is told by its debugging pipe: JSON messages, each with a zero byte behind it, in by descriptor 3 and out by 4.
//! Pictures go to the folder that `PAGEONE_SCREENSHOTS` names, to be looked at.

mod common;

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use common::{
    Place, Running, alone, daemon, equal_guests, need_agent, pageone, serve, wait_for,
    wait_for_sharing,
};
use serde_json::{Value, json};

const PAGES: usize = 512;
/// The wide ones have room for all columns of the tables.
const SCREENS: [(&str, u32, &str); 4] = [
    ("wide-light", 1280, "light"),
    ("wide-dark", 1280, "dark"),
    ("phone-light", 360, "light"),
    ("phone-dark", 360, "dark"),
];

/// A browser with one page.
struct Browser {
    process: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
    last: u64,
    session: Value,
}

impl Browser {
    /// `None` where there is no Chromium.
    fn start(folder: &Path) -> Option<Self> {
        let program = common::fetched("chromium", "lib/chromium/chromium", "make browser")?;
        let mut shell = Command::new("sh");
        if program.is_absolute() {
            let libraries = common::programs().join("lib/x86_64-linux-gnu");
            let mut path = libraries.clone().into_os_string();
            path.push(":");
            path.push(libraries.join("pulseaudio"));
            shell.env("LD_LIBRARY_PATH", path);
        }
        shell.args(["-c", "exec \"$@\" 3<&0 4>&1 </dev/null >/dev/null", "sh"]);
        shell.arg(program);
        shell.args([
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
        ]);
        shell.args(["--remote-debugging-pipe", "--hide-scrollbars"]);
        shell.arg(format!("--user-data-dir={}", folder.display()));
        shell.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = shell.stderr(Stdio::null()).spawn().expect("a browser");
        let to = process.stdin.take().expect("its input");
        let from = BufReader::new(process.stdout.take().expect("its output"));
        let mut browser = Self {
            process,
            to,
            from,
            last: 0,
            session: Value::Null,
        };
        let page = browser.ask("Target.createTarget", json!({ "url": "about:blank" }));
        let attach = json!({ "targetId": page["targetId"], "flatten": true });
        browser.session = browser.ask("Target.attachToTarget", attach)["sessionId"].clone();
        Some(browser)
    }

    /// Sends a message, and gives the answer to it; what is said in between is passed over.
    fn ask(&mut self, method: &str, params: Value) -> Value {
        self.last += 1;
        let mut message = json!({ "id": self.last, "method": method, "params": params });
        if !self.session.is_null() {
            message["sessionId"] = self.session.clone();
        }
        self.to
            .write_all(message.to_string().as_bytes())
            .expect("told");
        self.to.write_all(&[0]).expect("told");
        loop {
            let mut said = Vec::new();
            self.from.read_until(0, &mut said).expect("a message");
            assert_eq!(said.pop(), Some(0), "the browser has ended at {method}");
            let said: Value = serde_json::from_slice(&said).expect("JSON");
            if said["id"] == self.last {
                assert!(said["error"].is_null(), "{method}: {said}");
                return said["result"].clone();
            }
        }
    }

    /// The value of an expression in the page.
    fn value(&mut self, expression: &str) -> Value {
        let params =
            json!({ "expression": expression, "returnByValue": true, "awaitPromise": true });
        let said = self.ask("Runtime.evaluate", params);
        assert!(said["exceptionDetails"].is_null(), "{expression}: {said}");
        said["result"]["value"].clone()
    }

    fn shape(&mut self, width: u32, scheme: &str) {
        let metrics = json!({ "width": width, "height": 1400, "deviceScaleFactor": 1, "mobile": width < 500 });
        self.ask("Emulation.setDeviceMetricsOverride", metrics);
        let media = json!({ "features": [{ "name": "prefers-color-scheme", "value": scheme }] });
        self.ask("Emulation.setEmulatedMedia", media);
    }

    /// Moves the mouse to a place of the window.
    fn point(&mut self, x: f64, y: f64) {
        let params = json!({ "type": "mouseMoved", "x": x, "y": y });
        self.ask("Input.dispatchMouseEvent", params);
    }

    /// A finger that is put down at a place of the window, and lifted.
    fn touch(&mut self, x: f64, y: f64) {
        let at = json!([{ "x": x, "y": y }]);
        for (kind, points) in [("touchStart", at), ("touchEnd", json!([]))] {
            let params = json!({ "type": kind, "touchPoints": points });
            self.ask("Input.dispatchTouchEvent", params);
        }
    }

    fn press(&mut self, key: &str) {
        for kind in ["keyDown", "keyUp"] {
            let params = json!({ "type": kind, "key": key, "code": key });
            self.ask("Input.dispatchKeyEvent", params);
        }
    }

    /// Keeps a picture, where the environment names a folder for it.
    fn picture(&mut self, name: &str) {
        let Some(folder) = std::env::var_os("PAGEONE_SCREENSHOTS") else {
            return;
        };
        let said = self.ask(
            "Page.captureScreenshot",
            json!({ "captureBeyondViewport": true }),
        );
        let mut decode = Command::new("base64");
        let file = std::fs::File::create(Path::new(&folder).join(format!("{name}.png")));
        decode
            .arg("-d")
            .stdin(Stdio::piped())
            .stdout(file.expect("a file"));
        let mut decoding = decode.spawn().expect("base64");
        let data = said["data"].as_str().expect("a picture");
        let mut input = decoding.stdin.take().expect("its input");
        input.write_all(data.as_bytes()).expect("written");
        drop(input);
        assert!(decoding.wait().expect("ended").success());
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[test]
fn it_shows_the_saving_and_fits_a_phone() {
    let folder = tempfile::tempdir().expect("a folder");
    let Some(mut browser) = Browser::start(folder.path()) else {
        return;
    };
    let _alone = alone();
    need_agent();
    let place = Place::new();
    let _daemon = daemon(&place, &["--merge-period", "100ms"]);
    let _guests = equal_guests(&place, PAGES as u64);
    wait_for_sharing(&place, PAGES, 0);
    let mut alone = pageone();
    alone.args(["run", "--any", "--domain", "hermit", "--socket"]);
    alone.arg(place.socket()).args(["--", "sleep", "600"]);
    let _alone_in_its_domain = Running(alone.spawn().expect("a guest"));
    let (_serve, address) = serve(&place);
    browser.ask(
        "Page.navigate",
        json!({ "url": format!("http://{address}/") }),
    );
    let shown = wait_for("the saving in the page", || {
        let text = browser.value("document.body ? document.body.innerText : ''");
        let text = text.as_str().unwrap_or_default().to_owned();
        (text.contains("2.0 MiB") && text.contains("uid:") && text.contains("hermit"))
            .then_some(text)
    });
    let why = browser.value("document.getElementById('reasons').innerText");
    let why = why.as_str().unwrap_or_default();
    assert!(why.contains("no other guest is in its domain"), "{why}");
    // The daemon takes a sample every ten seconds, and a line has two points; a rate has one fewer.
    let mut wanted = vec![("saved", "L"), ("cpu", "M")];
    if Path::new("/proc/pressure/memory").exists() {
        wanted.push(("stalls", "L"));
    }
    wait_for("a line in each chart", || {
        let all = wanted.iter().all(|(chart, part)| {
            let drawn = format!("!!document.querySelector('#{chart} path[d*=\"{part}\"]')");
            browser.value(&drawn) == true
        });
        all.then_some(())
    });
    let heads = browser
        .value("[...document.querySelectorAll('#guests th')].map(one => one.textContent).join()");
    let wanted = "name,PID,domain,saved,net,of its memory,memory,in motion,mappings,CPU time,";
    assert_eq!(heads, wanted);
    for part in [
        "saved",
        "Guests",
        "Domains",
        "Pages by state",
        "Why not more",
    ] {
        assert!(shown.contains(part), "no `{part}` in:\n{shown}");
    }
    let mut colours = Vec::new();
    for (name, width, scheme) in SCREENS {
        browser.shape(width, scheme);
        let over = browser.value(
            "[document.documentElement, ...document.querySelectorAll('.scroll')]
               .map(one => one.scrollWidth - one.clientWidth)
               .reduce((most, one) => Math.max(most, one), 0)",
        );
        assert_eq!(over, 0, "{name}: wider than the screen");
        let colour = browser.value("getComputedStyle(document.body).backgroundColor");
        colours.push(colour.to_string());
        browser.picture(name);
    }
    assert_ne!(colours[0], colours[1], "light and dark look alike");
    let requests = browser.value(
        "performance.getEntriesByType('resource').filter(one => new URL(one.name).origin !== location.origin).length",
    );
    assert_eq!(requests, 0, "another server was asked");
}

/// A history of four samples, ten seconds apart, with a time without a daemon before the last.
const MADE_UP: &str = "get = async path => {
    if (!path.startsWith('/api/history')) throw new Error('not now');
    const one = (n, unseen_seconds) => ({ at: 1700000000 + 10 * n, saved_bytes: (n + 1) * 2 ** 20,
        net_saved_bytes: (n + 1) * 2 ** 19, cpu_seconds: n, stall_percent: null, unseen_seconds });
    return { samples: [one(0, 0), one(1, 0), one(2, 0), one(3, 5)] };
}; true";

/// The page of a server without a daemon, with a history that is made up.
fn show_made_up(browser: &mut Browser) -> Running {
    let (serve, address) = serve(&Place::new());
    let page = json!({ "url": format!("http://{address}/") });
    browser.ask("Page.navigate", page);
    // Without it a page that no window shows has no focus.
    let focus = json!({ "enabled": true });
    browser.ask("Emulation.setFocusEmulationEnabled", focus);
    wait_for("the script of the page", || {
        (browser.value("typeof look") == "function").then_some(())
    });
    browser.value(MADE_UP);
    serve
}

/// What the legend of the first chart says, whether there is a cursor, and what a screen reader is told.
fn told(browser: &mut Browser) -> (String, bool, String) {
    let legend = browser.value("document.querySelector('#saved .legend').textContent");
    let line = browser.value("!!document.querySelector('#saved .cursor line')");
    let value = browser.value("document.getElementById('saved').getAttribute('aria-valuetext')");
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    (text(&legend), line == true, text(&value))
}

/// Part `part` of the width of the first chart, as a place of the window.
fn place(browser: &mut Browser, part: f64) -> (f64, f64) {
    let box_of = "(({ x, y, width, height }) => [x, y, width, height])
        (document.querySelector('#saved svg').getBoundingClientRect())";
    let sides = browser.value(box_of);
    let side = |at: usize| sides[at].as_f64().expect("a number");
    (side(0) + part * side(2), side(1) + side(3) / 2.0)
}

#[test]
fn a_cursor_tells_the_values_of_a_chart_at_a_time() {
    let folder = tempfile::tempdir().expect("a folder");
    let Some(mut browser) = Browser::start(folder.path()) else {
        return;
    };
    let _serve = show_made_up(&mut browser);
    let saved = |mib: u32, half: &str| format!("saved: {mib}.0 MiBnet: {half}");
    let now = saved(4, "2.0 MiB");
    let mut colours = Vec::new();
    for (name, width, scheme) in SCREENS {
        browser.shape(width, scheme);
        browser.value("look()");
        let (legend, line, value) = told(&mut browser);
        assert_eq!((&legend, line), (&now, false), "{name}: as it was");
        assert_eq!(value, "now, saved: 4.0 MiB, net: 2.0 MiB", "{name}");
        for (part, legend) in [(0.15, saved(1, "512 KiB")), (0.99, now.clone())] {
            let (x, y) = place(&mut browser, part);
            browser.point(x, y);
            let (said, line, _) = told(&mut browser);
            assert_eq!((said, line), (legend, true), "{name}: at {part}");
        }
        let (x, y) = place(&mut browser, 0.5);
        browser.point(x, y);
        let before = told(&mut browser);
        assert_eq!(before.0, saved(2, "1.0 MiB"), "{name}: {before:?}");
        browser.value("look()");
        assert_eq!(told(&mut browser), before, "{name}: it is drawn again");
        let stroke = "getComputedStyle(document.querySelector('#saved .cursor line')).stroke";
        colours.push(browser.value(stroke).to_string());
        browser.picture(&format!("cursor-{name}"));
        browser.point(1.0, 1.0);
        let (said, line, _) = told(&mut browser);
        assert_eq!((&said, line), (&now, false), "{name}: the mouse is gone");
    }
    assert_ne!(colours[0], colours[1], "light and dark look alike");
}

#[test]
fn the_cursor_goes_by_keys_and_by_touch() {
    let folder = tempfile::tempdir().expect("a folder");
    let Some(mut browser) = Browser::start(folder.path()) else {
        return;
    };
    let _serve = show_made_up(&mut browser);
    browser.shape(360, "light");
    browser.value("look()");
    browser.value("document.getElementById('saved').focus()");
    for (key, mib) in [
        ("ArrowLeft", "4.0"),
        ("ArrowLeft", "3.0"),
        ("ArrowLeft", "2.0"),
        ("ArrowRight", "3.0"),
        ("Home", "1.0"),
        ("ArrowLeft", "1.0"),
        ("End", "4.0"),
    ] {
        browser.press(key);
        let (legend, line, value) = told(&mut browser);
        let begin = format!("saved: {mib} MiB");
        assert!(line && legend.starts_with(&begin), "{key}: {legend}");
        assert!(value.contains(&begin), "{key}: {value}");
        assert!(value.contains(":"), "it tells the time: {value}");
    }
    browser.press("Escape");
    assert!(!told(&mut browser).1, "Escape takes it away");
    let touch = json!({ "enabled": true, "maxTouchPoints": 1 });
    browser.ask("Emulation.setTouchEmulationEnabled", touch);
    let (x, y) = place(&mut browser, 0.15);
    browser.touch(x, y);
    let (legend, line, _) = told(&mut browser);
    assert!(line && legend.starts_with("saved: 1.0 MiB"), "{legend}");
    browser.value("document.getElementById('cpu').focus()");
    assert!(!told(&mut browser).1, "another place was touched");
}

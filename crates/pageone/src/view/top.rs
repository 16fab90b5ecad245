//! `pageone top`: the guests of a daemon on the whole terminal, again and again.
//!
//! ```text
//! Asker ──▶ Top (what is shown, in which order) ──▶ draw ──▶ the terminal, or a test's 80 × 24
//!  keys ──▶
//! ```
//!
//! A thread of its own asks, so that keys are heeded while a daemon hangs.

use std::cmp::Ordering;
use std::collections::VecDeque;
use std::io::{self, IsTerminal};
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, ensure};
use ratatui::backend::Backend;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use ratatui::crossterm::execute;
use ratatui::crossterm::terminal::EnterAlternateScreen;
use ratatui::layout::{Constraint, Layout, Rect, Size};
use ratatui::style::{Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Clear, Paragraph, Row, Sparkline, Table};
use ratatui::{DefaultTerminal, Frame, Terminal, TerminalOptions, Viewport};
use sys::foreign::ForeignName;
use wire::{GuestStatus, PAGE_BYTES, RunMode, Status};

use super::status::{ask_quietly, shown};
use crate::{human, paths};

#[derive(clap::Args)]
pub(crate) struct Args {
    #[arg(long, help = crate::paths::SERVED)]
    socket: Option<PathBuf>,
    /// The time between two looks
    #[arg(long, value_name = "TIME", value_parser = human::period, default_value = "2s")]
    every: Duration,
}

/// Shows the guests until a key ends it.
pub(crate) fn main(args: &Args) -> Result<()> {
    ensure!(
        io::stdin().is_terminal() && io::stdout().is_terminal(),
        "`pageone top` needs a terminal; `pageone status --watch 2s` writes anywhere"
    );
    let socket = paths::served(args.socket.as_deref())?;
    let mut asker = Asker::start(move || ask_quietly(&socket))?;
    let mut top = Top::default();
    asker.ask();
    // Without a daemon it ends with words, on a terminal that is as it was.
    match asker.answer(SILENCE) {
        Some(status) => top.take(status?),
        None => top.await_answer(SILENCE),
    }
    let mut terminal = begin().inspect_err(|_| ratatui::restore())?;
    let result = loop {
        let drawn = fit(&mut terminal).and_then(|()| terminal.draw(|frame| top.draw(frame)));
        if let Err(error) = drawn {
            break Err(error.into());
        }
        let left = asker.rest(args.every);
        match event::poll(left).and_then(|ready| ready.then(event::read).transpose()) {
            Ok(Some(Event::Key(key))) if key.kind == KeyEventKind::Press => {
                let ends =
                    key.modifiers.contains(KeyModifiers::CONTROL) && key.code == KeyCode::Char('c');
                if ends || top.key(key.code) {
                    break Ok(());
                }
            }
            Ok(_) => {}
            Err(error) => break Err(error.into()),
        }
        if !asker.waits && asker.asked.elapsed() >= args.every {
            asker.ask();
        }
        match asker.answer(Duration::ZERO) {
            Some(Ok(status)) => top.take(status),
            // The next daemon may come.
            Some(Err(error)) => top.trouble = Some(format!("{error:#}")),
            None if asker.waits => top.await_answer(asker.asked.elapsed()),
            None => {}
        }
    };
    ratatui::restore();
    result
}

/// The most columns and rows that are drawn.
const MOST: Size = Size::new(1024, 1024);

/// The whole terminal; [`fit`] says how much of it is drawn.
fn begin() -> io::Result<DefaultTerminal> {
    let viewport = Viewport::Fixed(Rect::ZERO);
    let terminal = ratatui::try_init_with_options(TerminalOptions { viewport })?;
    execute!(io::stdout(), EnterAlternateScreen)?;
    Ok(terminal)
}

/// Heeds the terminal's size. A pseudo-terminal says whatever it was told: the cells of 65535 columns and rows would take all memory,
/// and the library adds to such numbers.
fn fit<B: Backend>(terminal: &mut Terminal<B>) -> Result<(), B::Error> {
    let Size { width, height } = terminal.size()?;
    let area = Rect::new(0, 0, width.min(MOST.width), height.min(MOST.height));
    match terminal.get_frame().area() == area {
        true => Ok(()),
        false => terminal.resize(area),
    }
}

/// A daemon that is silent for so long is said to be.
const SILENCE: Duration = Duration::from_secs(2);
/// The longest time between two looks for an answer.
const GLANCE: Duration = Duration::from_millis(50);

/// A thread that asks the daemon. It goes with the process.
struct Asker {
    to: Sender<()>,
    from: Receiver<Result<Status>>,
    /// When it was asked last, and whether it has not answered yet.
    asked: Instant,
    waits: bool,
}

impl Asker {
    fn start(look: impl Fn() -> Result<Status> + Send + 'static) -> Result<Self> {
        let (to, asked) = channel();
        let (answer, from) = channel();
        let work = move || {
            while let Ok(()) = asked.recv()
                && answer.send(look()).is_ok()
            {}
        };
        std::thread::Builder::new()
            .name("asker".to_owned())
            .spawn(work)?;
        Ok(Self {
            to,
            from,
            asked: Instant::now(),
            waits: false,
        })
    }

    fn ask(&mut self) {
        // It takes questions for as long as this is there.
        self.waits = self.to.send(()).is_ok();
        self.asked = Instant::now();
    }

    /// The answer, if it comes within `wait`.
    fn answer(&mut self, wait: Duration) -> Option<Result<Status>> {
        if !self.waits {
            return None;
        }
        let answer = match self.from.recv_timeout(wait) {
            Ok(answer) => answer,
            Err(RecvTimeoutError::Timeout) => return None,
            Err(RecvTimeoutError::Disconnected) => Err(anyhow!("the thread that asks has ended")),
        };
        self.waits = false;
        Some(answer)
    }

    /// How long keys may be waited for until there is something else to do.
    fn rest(&self, every: Duration) -> Duration {
        match self.waits {
            true => GLANCE,
            false => every.saturating_sub(self.asked.elapsed()),
        }
    }
}

/// By what guests are sorted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Order {
    #[default]
    Saved,
    Net,
    Memory,
    Motion,
    Mappings,
    Cpu,
    Name,
    Domain,
    Pid,
}

/// A key, the order it asks for, and its name.
const ORDERS: [(char, Order, &str); 9] = [
    ('s', Order::Saved, "saved"),
    ('e', Order::Net, "net saved"),
    ('m', Order::Memory, "memory"),
    ('v', Order::Motion, "in motion"),
    ('n', Order::Mappings, "mappings"),
    ('u', Order::Cpu, "CPU time of its agent"),
    ('c', Order::Name, "name"),
    ('d', Order::Domain, "domain"),
    ('p', Order::Pid, "PID"),
];

impl Order {
    /// Figures from the greatest, names from the first.
    fn compare(self, a: &GuestStatus, b: &GuestStatus) -> Ordering {
        let by = match self {
            Self::Saved => b.saved_bytes.cmp(&a.saved_bytes),
            Self::Net => b.net_saved_bytes.cmp(&a.net_saved_bytes),
            Self::Memory => b.pages.cmp(&a.pages),
            Self::Motion => b.pages_volatile.cmp(&a.pages_volatile),
            Self::Mappings => b.vmas.cmp(&a.vmas),
            Self::Cpu => b.cpu_seconds.total_cmp(&a.cpu_seconds),
            Self::Name => name(a).cmp(name(b)),
            Self::Domain => a.domain.cmp(&b.domain),
            Self::Pid => a.pid.cmp(&b.pid),
        };
        by.then(a.pid.cmp(&b.pid))
    }
}

/// Looks that the line over the table goes back, at most.
const LOOKS: usize = 512;

/// What is on the screen.
#[derive(Default)]
struct Top {
    status: Status,
    /// The saving at each look, the last one at the end.
    saved: VecDeque<u64>,
    /// When the last look was, and the CPU time it told.
    before: Option<(Instant, f64)>,
    cpu_percent: Option<f64>,
    order: Order,
    reversed: bool,
    help: bool,
    /// Rows above the first one that is seen.
    skipped: usize,
    trouble: Option<String>,
}

impl Top {
    fn take(&mut self, status: Status) {
        let now = Instant::now();
        self.cpu_percent = self.before.and_then(|(at, cpu)| {
            let passed = (now - at).as_secs_f64();
            let used = status.cpu_seconds - cpu;
            (passed > 0.0 && used >= 0.0).then(|| 100.0 * used / passed)
        });
        self.before = Some((now, status.cpu_seconds));
        if self.saved.len() == LOOKS {
            self.saved.pop_front();
        }
        self.saved.push_back(status.saved_bytes);
        self.trouble = None;
        self.status = status;
        self.sort();
    }

    /// Says that the daemon is silent, once it has been for long.
    fn await_answer(&mut self, waited: Duration) {
        if waited >= SILENCE {
            let seconds = waited.as_secs();
            self.trouble = Some(format!(
                "the daemon does not answer, for {seconds} s now   q quit"
            ));
        }
    }

    fn sort(&mut self) {
        let order = self.order;
        self.status.guests.sort_by(|a, b| order.compare(a, b));
        if self.reversed {
            self.status.guests.reverse();
        }
    }

    /// Heeds a key; true when it ends the view.
    fn key(&mut self, key: KeyCode) -> bool {
        let last = self.status.guests.len().saturating_sub(1);
        match key {
            KeyCode::Char('q') => return true,
            KeyCode::Esc if !self.help => return true,
            KeyCode::Char('h' | '?') => self.help = !self.help,
            KeyCode::Esc => self.help = false,
            KeyCode::Char('r') => self.reversed = !self.reversed,
            KeyCode::Down => self.skipped = (self.skipped + 1).min(last),
            KeyCode::Up => self.skipped = self.skipped.saturating_sub(1),
            KeyCode::PageDown => self.skipped = (self.skipped + 10).min(last),
            KeyCode::PageUp => self.skipped = self.skipped.saturating_sub(10),
            KeyCode::Home => self.skipped = 0,
            KeyCode::Char(key) => {
                if let Some((_, order, _)) = ORDERS.iter().find(|(its, ..)| *its == key) {
                    (self.order, self.skipped) = (*order, 0);
                }
            }
            _ => {}
        }
        self.sort();
        false
    }

    fn draw(&self, frame: &mut Frame<'_>) {
        let parts = [
            Constraint::Length(2),
            Constraint::Length(3),
            Constraint::Min(2),
            Constraint::Length(1),
        ];
        let [head, line, table, foot] = Layout::vertical(parts).areas(frame.area());
        frame.render_widget(self.head(), head);
        self.line(frame, line);
        frame.render_widget(self.table(table.width), table);
        let foot_text = match &self.trouble {
            Some(why) => Line::styled(why.clone(), Style::new().add_modifier(Modifier::BOLD)),
            None => {
                Line::from("q quit   h help   s e m v n u c d p sort   r reverse   arrows scroll")
            }
        };
        frame.render_widget(Paragraph::new(foot_text), foot);
        if self.help {
            help(frame);
        }
    }

    fn head(&self) -> Paragraph<'static> {
        if self.before.is_none() {
            return Paragraph::new("PageONE: no answer yet");
        }
        let status = &self.status;
        let mode = match status.knobs.run {
            RunMode::Stop => "stopped",
            RunMode::Run => "merging",
            RunMode::Unmerge => "unmerging",
        };
        let period = humantime::format_duration(Duration::from_millis(status.effective_period_ms));
        // Of all guests together: no user is told it alone.
        let is_all = status.only_user.is_none();
        let cpu = self
            .cpu_percent
            .filter(|_| is_all)
            .map_or("–".to_owned(), |cpu| format!("{cpu:.1}"));
        let first = format!(
            "PageONE {mode}, a look every {period}, {}, CPU {cpu} % of a core",
            human::count(status.guests.len(), "guest")
        );
        let saved = human::size(status.saved_bytes);
        let second = match is_all {
            true => format!(
                "saved {saved}   net {}   stored {}   metadata {}",
                human::bytes(status.net_saved_bytes),
                human::size(status.store_bytes),
                human::size(status.metadata_bytes)
            ),
            false => format!("saved {saved}   only your own guests are counted"),
        };
        let bold = Style::new().add_modifier(Modifier::BOLD);
        Paragraph::new(vec![Line::from(first), Line::styled(second, bold)])
    }

    /// The saving over the last looks.
    fn line(&self, frame: &mut Frame<'_>, area: Rect) {
        let skip = self.saved.len().saturating_sub(usize::from(area.width));
        let data: Vec<u64> = self.saved.iter().skip(skip).copied().collect();
        frame.render_widget(Sparkline::default().data(&data), area);
    }

    fn table(&self, width: u16) -> Table<'static> {
        let chosen = ORDERS.iter().find(|(_, order, _)| *order == self.order);
        let chosen = chosen.map(|(key, ..)| *key);
        let columns = columns(width, chosen);
        let heads = columns.iter().map(|column| {
            let style = match column.key.is_some() && column.key == chosen {
                true => Style::new().add_modifier(Modifier::REVERSED),
                false => Style::new().add_modifier(Modifier::BOLD),
            };
            Span::styled(column.head, style)
        });
        let guests = self.status.guests.iter().skip(self.skipped);
        let rows = guests.map(|guest| row(guest, &columns));
        let widths = columns
            .iter()
            .map(|column| Constraint::Length(column.width));
        Table::new(rows, widths)
            .header(Row::new(heads))
            .column_spacing(1)
    }
}

/// That of the machine, if it has one.
fn name(guest: &GuestStatus) -> &ForeignName {
    guest.name.as_ref().unwrap_or(&guest.comm)
}

/// A column: its head, its width, the key that sorts by it, and when it gives way: those with the highest number first.
#[derive(Clone, Copy)]
struct Column {
    head: &'static str,
    width: u16,
    key: Option<char>,
    gives_way: u8,
    cell: fn(&GuestStatus) -> String,
}

const fn column(
    (head, width, gives_way): (&'static str, u16, u8),
    key: Option<char>,
    cell: fn(&GuestStatus) -> String,
) -> Column {
    Column {
        head,
        width,
        key,
        gives_way,
        cell,
    }
}

const COLUMNS: [Column; 10] = [
    column(("PID", 7, 0), Some('p'), |guest| guest.pid.to_string()),
    column(("NAME", 15, 2), Some('c'), shown),
    column(("DOMAIN", 15, 4), Some('d'), |guest| {
        guest.domain.to_string()
    }),
    column(("MEMORY", 8, 3), Some('m'), |guest| {
        human::size(bytes(guest.pages))
    }),
    column(("SAVED", 8, 1), Some('s'), |guest| {
        human::size(guest.saved_bytes)
    }),
    column(("NET", 9, 5), Some('e'), |guest| {
        human::bytes(guest.net_saved_bytes)
    }),
    column(("CPU s", 6, 6), Some('u'), |guest| {
        let digits = usize::from(guest.cpu_seconds < 9999.95);
        format!("{:.digits$}", guest.cpu_seconds)
    }),
    column(("%", 3, 7), None, |guest| {
        let saved = guest.saved_bytes.saturating_mul(100);
        let percent = saved.checked_div(bytes(guest.pages));
        percent.unwrap_or(0).to_string()
    }),
    column(("MOTION", 8, 8), Some('v'), |guest| {
        human::size(bytes(guest.pages_volatile))
    }),
    column(("MAPS", 5, 9), Some('n'), |guest| guest.vmas.to_string()),
];

/// Those for which there is room: a value that is cut would be a wrong one. The one that sorts stays, beside the PID.
fn columns(width: u16, chosen: Option<char>) -> Vec<Column> {
    let mut columns = COLUMNS.to_vec();
    let needs = |columns: &[Column]| columns.iter().map(|column| column.width + 1).sum::<u16>() - 1;
    let rank = |column: &Column| {
        let is_asked_for = column.gives_way == 0 || column.key == chosen;
        (!is_asked_for, column.gives_way)
    };
    while columns.len() > 1 && needs(&columns) > width {
        let last = columns.iter().map(rank).max();
        columns.retain(|column| Some(rank(column)) != last);
    }
    columns
}

fn bytes(pages: u64) -> u64 {
    pages.saturating_mul(PAGE_BYTES as u64)
}

fn row(guest: &GuestStatus, columns: &[Column]) -> Row<'static> {
    let style = match guest.responsive {
        true => Style::new(),
        false => Style::new().add_modifier(Modifier::DIM),
    };
    Row::new(columns.iter().map(|column| (column.cell)(guest))).style(style)
}

/// What keys do, over the table.
fn help(frame: &mut Frame<'_>) {
    let mut lines: Vec<_> = ORDERS
        .iter()
        .map(|(key, _, name)| Line::from(format!(" {key}  sort by {name}")))
        .collect();
    lines.extend([
        Line::from(" r  reverse the order"),
        Line::from(" ↑ ↓ PgUp PgDn Home  scroll"),
        Line::from(" NET: less its tables, agent and mappings"),
        Line::from(" MOTION: written lately, or not yet observed"),
        Line::from(" A wide terminal has all columns"),
        Line::from(" h  close this    q  quit"),
    ]);
    let height = u16::try_from(lines.len())
        .unwrap_or(u16::MAX)
        .saturating_add(2);
    let whole = frame.area();
    let area = Rect {
        x: whole.x + whole.width.saturating_sub(50) / 2,
        y: whole.y + whole.height.saturating_sub(height) / 2,
        width: whole.width.min(50),
        height: whole.height.min(height),
    };
    frame.render_widget(Clear, area);
    frame.render_widget(
        Paragraph::new(lines).block(Block::bordered().title(" keys ")),
        area,
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use ratatui::backend::TestBackend;

    fn guest(pid: u32, comm: &str, mib: u64, saved_mib: u64) -> GuestStatus {
        GuestStatus {
            pid,
            comm: comm.into(),
            domain: "uid:0".into(),
            pages: mib << 8,
            saved_bytes: saved_mib << 20,
            net_saved_bytes: (saved_mib << 20).cast_signed() - (mib << 19).cast_signed(),
            cpu_seconds: f64::from(pid) * 1.25,
            vmas: 40,
            responsive: true,
            ..GuestStatus::default()
        }
    }

    fn top() -> Top {
        let mut top = Top::default();
        let guests = vec![
            guest(7, "qemu-system-x86", 1024, 512),
            guest(8, "redis\x1b[2J", 256, 200),
            guest(9, "java", 2048, 64),
            GuestStatus {
                name: Some("web".into()),
                ..guest(10, "qemu-system-x86", 512, 1)
            },
        ];
        for part in 1..=3 {
            top.take(Status {
                saved_bytes: (768 << 20) * part / 3,
                net_saved_bytes: 760 << 20,
                effective_period_ms: 20_000,
                guests: guests.clone(),
                ..Status::default()
            });
        }
        top.cpu_percent = Some(2.5);
        top
    }

    /// The lines of a terminal of so many columns, and 24 rows.
    fn screen_of(top: &Top, width: u16) -> Vec<String> {
        let mut terminal = Terminal::new(TestBackend::new(width, 24)).unwrap();
        terminal.draw(|frame| top.draw(frame)).unwrap();
        let buffer = terminal.backend().buffer();
        let line = |cells: &[ratatui::buffer::Cell]| {
            let line: String = cells.iter().map(ratatui::buffer::Cell::symbol).collect();
            line.trim_end().to_owned()
        };
        buffer.content().chunks(width.into()).map(line).collect()
    }

    fn screen(top: &Top) -> Vec<String> {
        screen_of(top, 80)
    }

    /// A value that is cut would be a wrong one.
    #[test]
    fn a_narrow_screen_has_fewer_columns() {
        let heads = |width| screen_of(&top(), width)[5].clone();
        assert_eq!(
            heads(93),
            "PID     NAME            DOMAIN          MEMORY   SAVED    NET       CPU s  %   MOTION   MAPS"
        );
        assert_eq!(
            heads(80),
            "PID     NAME            DOMAIN          MEMORY   SAVED    NET       CPU s  %"
        );
        assert_eq!(
            heads(60),
            "PID     NAME            DOMAIN          MEMORY   SAVED"
        );
        assert_eq!(heads(40), "PID     NAME            SAVED");
        assert_eq!(heads(20), "PID     SAVED");
        assert_eq!(heads(5), "PID");
    }

    #[test]
    fn the_column_that_sorts_is_shown() {
        let mut top = top();
        top.key(KeyCode::Char('v'));
        let heads = screen(&top)[5].clone();
        assert_eq!(
            heads,
            "PID     NAME            DOMAIN          MEMORY   SAVED    NET       MOTION"
        );
        assert_eq!(screen_of(&top, 20)[5], "PID     MOTION");
    }

    #[test]
    fn no_figure_is_wider_than_its_column() {
        let greatest = GuestStatus {
            pid: 1 << 22,
            pages: (1024 << 8) - 1,
            saved_bytes: (100 << 20) - 1,
            net_saved_bytes: 1 - (1 << 30),
            pages_volatile: (100 << 8) - 1,
            cpu_seconds: 999_999.0,
            vmas: 65_530,
            ..GuestStatus::default()
        };
        for column in COLUMNS {
            let cell = (column.cell)(&greatest);
            let width = usize::from(column.width);
            assert!(cell.chars().count() <= width, "{}: {cell}", column.head);
        }
    }

    /// With `PAGEONE_DRAW=1` it writes the file that it compares with otherwise.
    #[test]
    fn the_screen_is_as_drawn_before() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/src/view/top.txt");
        let drawn = screen(&top()).join("\n") + "\n";
        if std::env::var_os("PAGEONE_DRAW").is_some() {
            std::fs::write(path, &drawn).unwrap();
        }
        let before = std::fs::read_to_string(path).unwrap();
        assert_eq!(drawn, before, "\n{drawn}");
    }

    #[test]
    fn a_silent_daemon_is_named_and_waited_for_aside() {
        let (release, held) = channel();
        let look = move || held.recv().map_err(|_| anyhow!("it ended"));
        let mut asker = Asker::start(look).unwrap();
        let mut top = Top::default();
        asker.ask();
        assert!(asker.answer(Duration::from_millis(10)).is_none());
        assert!(asker.rest(Duration::from_secs(60)) <= GLANCE, "keys wait");
        top.await_answer(SILENCE / 2);
        assert!(!screen(&top).join("\n").contains("does not answer"));
        top.await_answer(SILENCE);
        let drawn = screen(&top).join("\n");
        assert!(drawn.contains("no answer yet"), "{drawn}");
        assert!(
            drawn.contains("the daemon does not answer, for 2 s"),
            "{drawn}"
        );
        release.send(Status::default()).unwrap();
        top.take(asker.answer(Duration::from_secs(60)).unwrap().unwrap());
        let drawn = screen(&top).join("\n");
        assert!(!drawn.contains("answer"), "{drawn}");
    }

    #[test]
    fn keys_sort_scroll_help_and_end() {
        let mut top = top();
        let first = |top: &Top| screen(top)[6].clone();
        assert!(first(&top).contains("qemu"), "{}", first(&top));
        for (key, name) in [
            ('m', "java"),
            ('c', "java"),
            ('p', "qemu"),
            ('e', "redis"),
            ('u', "web"),
            ('s', "qemu"),
        ] {
            assert!(!top.key(KeyCode::Char(key)));
            assert!(first(&top).contains(name), "{key}: {}", first(&top));
        }
        assert!(!top.key(KeyCode::Char('r')));
        assert!(first(&top).contains("web"), "a machine has its name");
        assert!(!top.key(KeyCode::Down));
        assert!(first(&top).contains("java"));
        assert!(!top.key(KeyCode::Char('h')));
        assert!(screen(&top).join("\n").contains("sort by mappings"));
        assert!(!top.key(KeyCode::Esc), "it closes the help");
        assert!(top.key(KeyCode::Esc));
        assert!(top.key(KeyCode::Char('q')));
        assert!(!screen(&top).join("\n").contains('\x1b'));
    }
}

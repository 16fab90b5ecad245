//! Tells how much of some files is duplicate: `cargo run --release -p one --example dedup -- PATH…`
//!
//! Reads files, and directories with all files below them, in blocks of a fixed size or cut by content. Puts every block into
//! one store, and prints what the store saved. Symbolic links are not followed. All different blocks are kept in memory.

use anyhow::{Context, Result};
use clap::Parser;
use fastcdc::v2020::StreamCDC;
use indicatif::{HumanBytes, ProgressBar, ProgressStyle};
use one::{Handle, Store};
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

/// Tells how much of some files is duplicate.
#[derive(Parser)]
struct Arguments {
    /// Files, and directories with everything below them.
    #[arg(required = true)]
    paths: Vec<PathBuf>,
    /// The size of the blocks in bytes; with --by-content their average size.
    #[arg(long, default_value_t = 4096, value_parser = clap::value_parser!(u32).range(256..=262_144))]
    block_bytes: u32,
    /// Cut blocks where the content says so (FastCDC), so that shifted duplicates are found.
    #[arg(long)]
    by_content: bool,
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let mut files = Vec::new();
    for path in &arguments.paths {
        list(path, &mut files)?;
    }
    let total = files.iter().map(|(_, len)| len).sum();
    let style = ProgressStyle::with_template(
        "{wide_bar} {bytes} of {total_bytes}, {binary_bytes_per_sec}, {eta} left",
    )?;
    let progress = ProgressBar::new(total).with_style(style);
    let store = Store::new();
    // A block's handle keeps the block: without it the store would forget what it has seen.
    let mut handles = Vec::new();
    for (path, _) in &files {
        let read = if arguments.by_content {
            cut_by_content
        } else {
            cut_by_size
        };
        read(path, arguments.block_bytes, &mut |block| {
            progress.inc(block.len() as u64);
            handles.push(store.put(block)?);
            Ok(())
        })
        .with_context(|| format!("reading {}", path.display()))?;
    }
    progress.finish_and_clear();
    print(&store, files.len(), &handles);
    Ok(())
}

/// Adds the regular files at and below `path`, with their lengths.
fn list(path: &Path, files: &mut Vec<(PathBuf, u64)>) -> Result<()> {
    let context = || format!("looking at {}", path.display());
    let metadata = path.symlink_metadata().with_context(context)?;
    if metadata.is_dir() {
        for entry in path.read_dir().with_context(context)? {
            list(&entry.with_context(context)?.path(), files)?;
        }
    } else if metadata.is_file() {
        files.push((path.to_path_buf(), metadata.len()));
    }
    Ok(())
}

type Block<'b> = dyn FnMut(&[u8]) -> Result<()> + 'b;

fn cut_by_size(path: &Path, block_bytes: u32, put: &mut Block<'_>) -> Result<()> {
    let mut file = File::open(path)?;
    let mut block = Vec::new();
    loop {
        block.clear();
        if file
            .by_ref()
            .take(u64::from(block_bytes))
            .read_to_end(&mut block)?
            == 0
        {
            return Ok(());
        }
        put(&block)?;
    }
}

fn cut_by_content(path: &Path, block_bytes: u32, put: &mut Block<'_>) -> Result<()> {
    let file = File::open(path)?;
    for block in StreamCDC::new(file, block_bytes / 4, block_bytes, block_bytes * 4) {
        put(&block?.data)?;
    }
    Ok(())
}

fn print(store: &Store, files: usize, handles: &[Handle]) {
    let stats = store.stats();
    println!("files            {files}");
    println!(
        "blocks           {} ({} different)",
        handles.len(),
        stats.objects
    );
    println!(
        "bytes            {} ({})",
        stats.logical_bytes,
        HumanBytes(stats.logical_bytes)
    );
    println!(
        "stored bytes     {} ({})",
        stats.stored_bytes,
        HumanBytes(stats.stored_bytes)
    );
    println!(
        "duplicate bytes  {} ({}, {:.1} %)",
        stats.saved_bytes(),
        HumanBytes(stats.saved_bytes()),
        100.0 * stats.duplicate_share()
    );
    println!("index bytes      {}", store.index_bytes());
}

//! Who may map what: refs of slots, and the lifelines that tell when a ref may go.
//!
//! A ref stands for one guest page that may map the slot (I4). It is taken before the agent is
//! asked, and what ends it depends on what is known:
//!
//! ```text
//!  planned, never asked                  ─▶ dropped at once: no mapping ever existed
//!  asked, and the agent refused          ─▶ dropped at once: likewise
//!  broken, discarded, asked in vain,     ─▶ release list of the guest's current lifeline epoch:
//!  guest or connection gone                 a fork child may have inherited the mapping
//! ```
//!
//! A lifeline is a page that the guest maps shared as long as its epoch lasts. Fork children
//! inherit it together with everything else that is mapped then. With the next sync after a
//! release the guest gets a new lifeline and unmaps the old one; as soon as nobody maps the old
//! one (and all before it), no process is left that could have inherited what was released in its
//! time. A connection that is merely lost is no evidence: the refs wait for the lifelines.
//!
//! The tempting alternative, to follow fork with an agent in each child, fails for children that
//! exec at once, that are made by clone without hooks, or that lost their agent.

mod chains;
mod home;
mod ledger;
mod slots;

pub(crate) use home::Home;
pub(crate) use ledger::{Ledger, Lifeline};
pub(crate) use slots::{Run, Slots, Taken, View};

//! The tc way of denying: takes the SMC option out of SYNs, on kernels without `smc_hs_ctrl` too.
//!
//! Attached to devices of this host, at egress and ingress. What is no SYN leaves after a few loads. Always returns
//! TC_ACT_UNSPEC: other programs of the chain still run, no packet is dropped.

use core::mem::MaybeUninit;

use aya_ebpf::{
    bindings::{__sk_buff, TC_ACT_UNSPEC},
    macros::classifier,
    programs::TcContext,
};
use smc_policy_common::{
    query::{Direction, Query},
    table::FLAG_FORWARDED,
};

use crate::{
    decision::{InForce, Transmission},
    maps,
    tc_option::Options,
    tc_packet::{ETHERNET, NONE, Syn, may_be_syn},
    tc_socket::{receiver, sender},
};

/// Egress of devices whose packets begin with an Ethernet header.
#[classifier]
pub fn smcpol_out_eth(ctx: TcContext) -> i32 {
    if may_be_syn(ctx.skb.skb, ETHERNET) {
        outgoing(ctx.skb.skb, ETHERNET);
    }
    TC_ACT_UNSPEC
}

/// Egress of devices whose packets begin with the IP header (tun, ipip, wireguard).
#[classifier]
pub fn smcpol_out_ip(ctx: TcContext) -> i32 {
    if may_be_syn(ctx.skb.skb, NONE) {
        outgoing(ctx.skb.skb, NONE);
    }
    TC_ACT_UNSPEC
}

/// Ingress of devices whose packets begin with an Ethernet header.
#[classifier]
pub fn smcpol_in_eth(ctx: TcContext) -> i32 {
    if may_be_syn(ctx.skb.skb, ETHERNET) {
        incoming(ctx.skb.skb, ETHERNET);
    }
    TC_ACT_UNSPEC
}

/// Ingress of devices whose packets begin with the IP header.
#[classifier]
pub fn smcpol_in_ip(ctx: TcContext) -> i32 {
    if may_be_syn(ctx.skb.skb, NONE) {
        incoming(ctx.skb.skb, NONE);
    }
    TC_ACT_UNSPEC
}

// Functions of their own: what is no SYN pays nothing for their frames.

/// Ways, as `maps::was_counted` has them.
const OUT: u32 = 0;
const IN: u32 = 1;

#[inline(never)]
extern "C" fn outgoing(skb: *mut __sk_buff, link: u32) -> u64 {
    judge(skb, link, OUT, |syn, table, counted| match sender(skb) {
        Some(owned) => table.may_offer_syn(&owned.query, transmission(owned.first, counted)),
        // From another host or namespace, or from a raw socket.
        None if table.flags().is_some_and(|flags| flags & FLAG_FORWARDED != 0) => {
            let query = Query {
                peer: syn.destination,
                local: syn.source,
                port: syn.destination_port,
                direction: Direction::Outbound,
            };
            table.may_offer(&query, transmission(true, counted))
        }
        None => {
            maps::count(|stat| &mut stat.no_socket, !counted);
            true
        }
    })
}

#[inline(never)]
extern "C" fn incoming(skb: *mut __sk_buff, link: u32) -> u64 {
    judge(skb, link, IN, |syn, table, counted| match receiver(skb, syn) {
        Some(owned) => table.may_offer(&owned.query, transmission(owned.first, counted)),
        // For another host or namespace: judged when it leaves, if at all, or it would be judged twice.
        None => {
            maps::count(|stat| &mut stat.no_listener, !counted);
            true
        }
    })
}

#[inline(always)]
fn transmission(first: bool, counted: bool) -> Transmission {
    if counted { Transmission::Counted } else { Transmission::new(first) }
}

/// Looks for the SMC option first: a SYN without it costs no decision. `may_offer` gets the SYN, the table to judge it by,
/// and whether it was counted already.
#[inline(always)]
fn judge(
    skb: *mut __sk_buff,
    link: u32,
    way: u32,
    may_offer: impl FnOnce(&Syn, InForce, bool) -> bool,
) -> u64 {
    let Some(syn) = Syn::find(skb, link) else { return 0 };
    let mut options = MaybeUninit::uninit();
    let options = Options::empty(&mut options);
    if !options.read(skb, &syn) {
        return 0;
    }
    let table = InForce::now();
    if !options.blank(table) {
        return 0;
    }
    let counted = maps::was_counted(way, syn.key());
    if options.is_signed() {
        maps::count(|stat| &mut stat.signed, !counted);
        return 0;
    }
    if !may_offer(&syn, table, counted) && !options.write(skb, &syn) {
        maps::count(|stat| &mut stat.unchanged, true);
    }
    0
}

//! The tc way of denying, and the guard against peers that echo options: takes the SMC option out of SYNs, on kernels without `smc_hs_ctrl` too.
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
    canary::Opening,
    event::WANTS_GUARD,
    quarantine::Cause,
    query::{Direction, Query},
    table::{FLAG_CANARY, FLAG_FORWARDED, FLAG_LEARN_ONLY, FLAG_OBSERVE},
};

use crate::{
    canary,
    decision::{InForce, Transmission},
    events, maps, quarantine,
    tc_option::{Canary, Options},
    tc_packet::{ETHERNET, NONE, SYN, SYN_ACK, Syn, look},
    tc_socket::{is_awaited, receiver, sender},
};

/// Egress of devices whose packets begin with an Ethernet header.
#[classifier]
pub fn smcpol_out_eth(ctx: TcContext) -> i32 {
    if look(ctx.skb.skb, ETHERNET).may_be_syn() {
        outgoing(ctx.skb.skb, ETHERNET);
    }
    TC_ACT_UNSPEC
}

/// Egress of devices whose packets begin with the IP header (tun, ipip, wireguard).
#[classifier]
pub fn smcpol_out_ip(ctx: TcContext) -> i32 {
    if look(ctx.skb.skb, NONE).may_be_syn() {
        outgoing(ctx.skb.skb, NONE);
    }
    TC_ACT_UNSPEC
}

/// Ingress of devices whose packets begin with an Ethernet header.
#[classifier]
pub fn smcpol_in_eth(ctx: TcContext) -> i32 {
    let look = look(ctx.skb.skb, ETHERNET);
    if look.may_be_syn() {
        incoming(ctx.skb.skb, ETHERNET);
    }
    if look.may_be_syn_ack() {
        answered(ctx.skb.skb, ETHERNET);
    }
    TC_ACT_UNSPEC
}

/// Ingress of devices whose packets begin with the IP header.
#[classifier]
pub fn smcpol_in_ip(ctx: TcContext) -> i32 {
    let look = look(ctx.skb.skb, NONE);
    if look.may_be_syn() {
        incoming(ctx.skb.skb, NONE);
    }
    if look.may_be_syn_ack() {
        answered(ctx.skb.skb, NONE);
    }
    TC_ACT_UNSPEC
}

/// Ingress of devices whose packets begin with an Ethernet header, where something else judges SYNs: the guard alone.
#[classifier]
pub fn smcpol_ack_eth(ctx: TcContext) -> i32 {
    if look(ctx.skb.skb, ETHERNET).may_be_syn_ack() {
        answered(ctx.skb.skb, ETHERNET);
    }
    TC_ACT_UNSPEC
}

/// The same for devices whose packets begin with the IP header.
#[classifier]
pub fn smcpol_ack_ip(ctx: TcContext) -> i32 {
    if look(ctx.skb.skb, NONE).may_be_syn_ack() {
        answered(ctx.skb.skb, NONE);
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
    let Some(syn) = Syn::find(skb, link, SYN) else { return 0 };
    let mut options = MaybeUninit::uninit();
    let options = Options::empty(&mut options);
    if !options.read(skb, &syn) {
        return 0;
    }
    let table = InForce::now();
    if !options.blank(table, false) {
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

/// A SYN-ACK that accepts SMC and returns our canary comes from somebody who echoes options: it loses both, so that the
/// connection becomes plain TCP, and the peer is learned.
#[inline(never)]
extern "C" fn answered(skb: *mut __sk_buff, link: u32) -> u64 {
    let Some(answer) = Syn::find(skb, link, SYN_ACK) else { return 0 };
    let mut options = MaybeUninit::uninit();
    let options = Options::empty(&mut options);
    if !options.read(skb, &answer) {
        return 0;
    }
    let table = InForce::now();
    // Nothing is marked where a policy only observes; what was marked before it did may be answered now.
    let flags = table.flags().unwrap_or(0);
    if flags & FLAG_CANARY == 0 {
        return 0;
    }
    if !options.blank(table, true) || options.is_signed() {
        return 0;
    }
    let opening = Opening {
        peer: answer.source,
        local: answer.destination,
        peer_port: answer.source_port,
        local_port: answer.destination_port,
        sequence: answer.acknowledged.wrapping_sub(1),
    };
    let (cause, nonce) = match options.canary() {
        Canary::None => return 0,
        Canary::Long(nonce) => {
            if !canary::is_ours(&opening, nonce) {
                maps::count(|stat| &mut stat.unproven, true);
                return 0;
            }
            (Cause::Echo, nonce)
        }
        Canary::Short => (Cause::ShortEcho, 0),
    };
    let is_left = flags & (FLAG_LEARN_ONLY | FLAG_OBSERVE) != 0;
    let is_blanked = !is_left && options.write(skb, &answer);
    if is_left {
        maps::count(|stat| &mut stat.kept_echoes, true);
    } else if is_blanked {
        maps::count(|stat| &mut stat.echoes, true);
    } else {
        maps::count(|stat| &mut stat.unchanged, true);
    }
    let is_awaited = is_awaited(skb, &answer, is_blanked);
    if (is_left || is_blanked) && events::are_wanted(WANTS_GUARD) {
        let short = if cause == Cause::ShortEcho { events::SHORT } else { 0 };
        let left = if is_left { events::LEFT } else { 0 };
        events::smcpol_echoed(&opening, u64::from(nonce) | short | left);
    }
    if flags & FLAG_OBSERVE != 0 {
        return 0;
    }
    // The short one proves nothing: whoever knows our option could have sent it, unless it answers a SYN of ours.
    if cause == Cause::ShortEcho && !is_awaited {
        maps::count(|stat| &mut stat.unlearned, true);
        return 0;
    }
    quarantine::learn(&opening, cause, nonce);
    0
}

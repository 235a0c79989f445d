//! `status --capabilities`: what this kernel has, and what that means for the tool.

use serde::Serialize;

use super::{
    outcome::{Done, Exit},
    output::{Output, Style, columns},
};
use crate::{
    kernel::capabilities::{Capability, Facts, Has, Usable, hooks, table},
    paths::Paths,
};

#[derive(Debug, Serialize)]
struct CapabilitiesDocument {
    /// No hook can be used: exit code 1.
    ok: bool,
    kernel: String,
    hooks: Vec<Usable>,
    capabilities: Vec<Capability>,
}

pub(super) fn run(paths: &Paths, out: &mut Output) -> Done {
    let document = document(&Facts::probe(paths));
    out.json(&document);
    out.text(&text(&document, |style, text| out.paint(style, text)));
    Ok(if document.ok { Exit::Ok } else { Exit::No })
}

fn document(facts: &Facts) -> CapabilitiesDocument {
    let hooks = hooks(facts);
    CapabilitiesDocument {
        // What could not be found out may work.
        ok: hooks.iter().any(|hook| hook.works != Has::No),
        kernel: facts.release.clone(),
        hooks: hooks.into(),
        capabilities: table(facts),
    }
}

fn text(document: &CapabilitiesDocument, paint: impl Fn(Style, &str) -> String) -> String {
    // That one thing is missing is usual; that a hook cannot be used is worse.
    let has = |has: Has, no: Style| paint(if has == Has::Yes { Style::Good } else { no }, &has.to_string());
    let mut rows = Vec::new();
    for hook in &document.hooks {
        let lacks = match hook.works {
            Has::Yes => "can be used".to_owned(),
            Has::No => format!("cannot be used: {}", hook.lacks.join(", ")),
            Has::Unknown => format!("not known: {}", hook.lacks.join(", ")),
        };
        rows.push(vec![format!("hook {}", hook.name), has(hook.works, Style::Bad), lacks]);
    }
    rows.push(vec![]);
    for capability in &document.capabilities {
        rows.push(vec![
            capability.name.to_owned(),
            has(capability.has, Style::Note),
            capability.detail.clone(),
        ]);
        rows.push(vec![String::new(), String::new(), paint(Style::Dim, capability.meaning)]);
    }
    columns(&rows, &[])
}

#[cfg(test)]
mod tests {
    use insta::assert_snapshot;

    use super::*;
    use crate::kernel::capabilities::{Answer, Module};

    fn new_kernel() -> Facts {
        Facts {
            release: "7.3.4".into(),
            smc: Module::Loaded,
            smc_diag: Module::BuiltIn,
            hs_ctrl: Answer::yes("net.smc.hs_ctrl"),
            tcx: Answer::yes("asked by bpf(2)"),
            clsact: Answer::yes("sch_ingress: built in; cls_bpf: module, loaded"),
            bpf_loop: Answer::yes("a program that calls it was loaded"),
            btf: Answer::yes("/sys/kernel/btf/vmlinux"),
            btf_smc: Answer::yes("/sys/kernel/btf/smc"),
            fexit_modules: Answer::yes("a program for smc_clc_wait_msg was loaded"),
            fmod_ret: Answer::yes("a program for update_socket_protocol was loaded"),
            ipproto_smc: Answer::yes("a socket was opened"),
            lockdown: Answer::yes("integrity"),
            cgroup2: Answer::yes("/sys/fs/cgroup"),
            bpffs: Answer::yes("/sys/fs/bpf"),
        }
    }

    fn old_kernel() -> Facts {
        Facts {
            release: "5.10.0-30-amd64".into(),
            smc: Module::File("kernel/net/smc/smc.ko.xz".into()),
            smc_diag: Module::File("kernel/net/smc/smc_diag.ko.xz".into()),
            hs_ctrl: Answer::no("no net.smc.hs_ctrl"),
            tcx: Answer::no("bpf(2) does not know it"),
            clsact: Answer::no(
                "sch_ingress: module, loaded; cls_bpf: neither built in nor there as a module",
            ),
            bpf_loop: Answer::no("invalid func unknown#181 (Invalid argument (os error 22))"),
            btf: Answer::no("/sys/kernel/btf/vmlinux: No such file or directory (os error 2)"),
            btf_smc: Answer::unknown("smc is not loaded"),
            fexit_modules: Answer::no("the kernel has no BTF"),
            fmod_ret: Answer::no("the kernel has no BTF"),
            ipproto_smc: Answer::no("the module smc does not bring it"),
            lockdown: Answer::no("none"),
            cgroup2: Answer::no("not mounted"),
            bpffs: Answer::no("not mounted at /sys/fs/bpf nor elsewhere"),
        }
    }

    fn container() -> Facts {
        let not_permitted = || Answer::unknown("not permitted here: needs CAP_BPF");
        Facts {
            release: "vendor-kernel".into(),
            smc: Module::Unknown("/lib/modules/vendor-kernel/modules.dep: No such file or directory".into()),
            smc_diag: Module::Absent,
            tcx: not_permitted(),
            clsact: Answer::unknown("sch_ingress: built in; cls_bpf: not loaded; is it there?"),
            bpf_loop: not_permitted(),
            btf: Answer::unknown("/sys/kernel/btf/vmlinux: Permission denied (os error 13)"),
            hs_ctrl: Answer::unknown("/proc/sys/net/smc: Permission denied (os error 13)"),
            btf_smc: Answer::unknown("smc is not loaded"),
            fexit_modules: not_permitted(),
            fmod_ret: not_permitted(),
            ipproto_smc: Answer::unknown("smc is not loaded"),
            lockdown: Answer::unknown("securityfs is not mounted at /sys/kernel/security"),
            cgroup2: Answer::unknown("/proc/thread-self/mounts: Permission denied (os error 13)"),
            bpffs: Answer::yes("/sys/fs/bpf"),
        }
    }

    fn shown(facts: &Facts) -> String {
        text(&document(facts), |_, text| text.to_owned())
    }

    #[test]
    fn a_kernel_with_everything() {
        assert!(document(&new_kernel()).ok);
        assert_snapshot!(shown(&new_kernel()), @r#"
        hook hs_ctrl   yes  can be used
        hook tc        yes  can be used

        kernel         yes  7.3.4
                            Linux 6.1 and later are supported
        smc            yes  module, loaded
                            programs can negotiate SMC, a policy says with whom
        hs_ctrl        yes  net.smc.hs_ctrl
                            policies are enforced before a packet is built, at no cost for packets
        tcx            yes  asked by bpf(2)
                            tc programs are attached by links, ahead of others
        clsact         yes  sch_ingress: built in; cls_bpf: module, loaded
                            tc programs can be attached where there is no tcx; the kernel loads these modules itself
        bpf_loop       yes  a program that calls it was loaded
                            the tc programs can be loaded
        btf            yes  /sys/kernel/btf/vmlinux
                            fields of sockets are found by it
        btf_smc        yes  /sys/kernel/btf/smc
                            hs_ctrl can be registered, where the kernel has it
        bpffs          yes  /sys/fs/bpf
                            what is in force is pinned there
        lockdown       yes  integrity
                            the kernel may refuse BPF programs; what was tried for the other lines works nevertheless
        smc_diag       yes  built in
                            `apply` names the live connections that a policy denies
        ipproto_smc    yes  a socket was opened
                            programs can ask for SMC by AF_SMC and by IPPROTO_SMC; a policy holds for both
        fexit_modules  yes  a program for smc_clc_wait_msg was loaded
                            the echo guard learns from failed negotiations
        fmod_ret       yes  a program for update_socket_protocol was loaded
                            programs could be given SMC without being changed; this version does not do so yet
        cgroup2        yes  /sys/fs/cgroup
                            connections of groups of processes can be watched; this version does not do so yet
        "#);
    }

    #[test]
    fn a_kernel_with_nothing() {
        assert!(!document(&old_kernel()).ok);
        assert_snapshot!(shown(&old_kernel()), @r#"
        hook hs_ctrl   no       cannot be used: hs_ctrl, btf, bpffs
        hook tc        no       cannot be used: tcx or clsact, bpf_loop, btf, bpffs

        kernel         no       5.10.0-30-amd64
                                older than Linux 6.1: not supported, nothing was tested there; use 6.1 or a later kernel
        smc            no       module, not loaded (kernel/net/smc/smc.ko.xz)
                                nothing negotiates SMC before somebody loads it: `modprobe smc`, and for every boot a line `smc` in /etc/modules-load.d/smc.conf; smc-policy never does
        hs_ctrl        no       no net.smc.hs_ctrl
                                only the tc hook can be used; hs_ctrl takes Linux 6.19 with CONFIG_SMC_HS_CTRL_BPF, and smc loaded
        tcx            no       bpf(2) does not know it
                                the tc hook takes a clsact qdisc instead; tcx takes Linux 6.6
        clsact         no       sch_ingress: module, loaded; cls_bpf: neither built in nor there as a module
                                without tcx the tc hook cannot be used; it takes CONFIG_NET_SCH_INGRESS and CONFIG_NET_CLS_BPF
        bpf_loop       no       invalid func unknown#181 (Invalid argument (os error 22))
                                the tc hook cannot be used: its programs need this helper, of Linux 5.17
        btf            no       /sys/kernel/btf/vmlinux: No such file or directory (os error 2)
                                no policy can be enforced: fields of sockets cannot be found; rebuild the kernel with CONFIG_DEBUG_INFO_BTF=y
        btf_smc        unknown  smc is not loaded
                                it can be seen when smc is loaded
        bpffs          no       not mounted at /sys/fs/bpf nor elsewhere
                                nothing can be put in force: `mount -t bpf bpf /sys/fs/bpf`, or name another place in SMC_POLICY_BPFFS
        lockdown       no       none
                                nothing is refused on its account
        smc_diag       no       module, not loaded (kernel/net/smc/smc_diag.ko.xz)
                                live connections are not listed unless the kernel loads it when asked: `modprobe smc_diag`
        ipproto_smc    no       the module smc does not bring it
                                programs can ask for SMC by AF_SMC only (smc_run), where smc is loaded; IPPROTO_SMC takes Linux 6.11
        fexit_modules  no       the kernel has no BTF
                                the echo guard does not learn from failed negotiations; its canary works all the same
        fmod_ret       no       the kernel has no BTF
                                programs get SMC by smc_run or by being changed; update_socket_protocol takes Linux 6.6 with CONFIG_MPTCP
        cgroup2        no       not mounted
                                connections of groups of processes cannot be watched; this version does not do so anyway
        "#);
    }

    #[test]
    fn a_process_that_may_see_nothing() {
        assert!(document(&container()).ok, "something may work");
        assert_snapshot!(shown(&container()), @r#"
        hook hs_ctrl   unknown  not known: hs_ctrl, btf_smc, btf
        hook tc        unknown  not known: tcx or clsact, bpf_loop, btf

        kernel         unknown  vendor-kernel
                                Linux 6.1 and later are supported; this name does not say which version it is
        smc            unknown  not loaded; is it there? /lib/modules/vendor-kernel/modules.dep: No such file or directory
                                nothing negotiates SMC before it is loaded: `modprobe smc`
        hs_ctrl        unknown  /proc/sys/net/smc: Permission denied (os error 13)
                                run it as root to know
        tcx            unknown  not permitted here: needs CAP_BPF
                                run it as root to know
        clsact         unknown  sch_ingress: built in; cls_bpf: not loaded; is it there?
                                needed only where there is no tcx
        bpf_loop       unknown  not permitted here: needs CAP_BPF
                                run it as root to know
        btf            unknown  /sys/kernel/btf/vmlinux: Permission denied (os error 13)
                                run it as root to know
        btf_smc        unknown  smc is not loaded
                                it can be seen when smc is loaded
        bpffs          yes      /sys/fs/bpf
                                what is in force is pinned there
        lockdown       unknown  securityfs is not mounted at /sys/kernel/security
                                `mount -t securityfs securityfs /sys/kernel/security` to know
        smc_diag       no       neither built in nor there as a module
                                live connections cannot be listed; policies work: it takes CONFIG_SMC_DIAG
        ipproto_smc    unknown  smc is not loaded
                                a policy holds for sockets of either kind
        fexit_modules  unknown  not permitted here: needs CAP_BPF
                                the echo guard tries it at the first apply when smc is loaded
        fmod_ret       unknown  not permitted here: needs CAP_BPF
                                it can be tried as root; this version does not use it yet
        cgroup2        unknown  /proc/thread-self/mounts: Permission denied (os error 13)
                                this version does not use it yet
        "#);
    }

    #[test]
    fn a_hook_works_by_what_it_takes() {
        let works = |change: fn(&mut Facts)| {
            let mut facts = new_kernel();
            change(&mut facts);
            hooks(&facts).map(|hook| (hook.works, hook.lacks.join(", ")))
        };
        let yes = || (Has::Yes, String::new());
        assert_eq!(works(|_| ()), [yes(), yes()]);
        assert_eq!(works(|f| f.tcx = Answer::no("")), [yes(), yes()], "clsact will do");
        assert_eq!(
            works(|f| (f.tcx, f.clsact) = (Answer::no(""), Answer::unknown(""))),
            [yes(), (Has::Unknown, "tcx or clsact".into())]
        );
        assert_eq!(
            works(|f| (f.tcx, f.clsact) = (Answer::no(""), Answer::no(""))),
            [yes(), (Has::No, "tcx or clsact".into())]
        );
        assert_eq!(works(|f| f.hs_ctrl = Answer::no("")), [(Has::No, "hs_ctrl".into()), yes()]);
        assert_eq!(works(|f| f.bpf_loop = Answer::no("")), [yes(), (Has::No, "bpf_loop".into())]);
        assert_eq!(
            works(|f| (f.bpffs, f.btf_smc) = (Answer::no(""), Answer::unknown(""))),
            [(Has::No, "bpffs".into()), (Has::No, "bpffs".into())]
        );
    }

    #[test]
    fn names_are_what_machines_read() {
        let json = serde_json::to_value(document(&old_kernel())).unwrap();
        assert_eq!(json["ok"], false);
        assert_eq!(json["hooks"][1]["works"], "no");
        assert_eq!(json["capabilities"][0]["name"], "kernel");
        assert_eq!(json["capabilities"][0]["has"], "no");
    }
}

"""Keys of cloud-init that mean nothing in a sandbox, and why. One that was left out silently would be missed later."""

from __future__ import annotations

_REASONS = {
    "a sandbox has one disk, which is there already: disk= says how large it may grow, volumes= brings others": (
        "disk_setup", "fs_setup", "mounts", "mount_default_fields", "swap", "growpart", "resize_rootfs",
        "device_aliases",
    ),
    "there is no SSH server in a sandbox: commands are run through the API": (
        "ssh", "ssh_keys", "ssh_pwauth", "ssh_deletekeys", "ssh_genkeytypes", "ssh_import_id", "disable_root",
        "disable_root_opts", "no_ssh_fingerprints", "ssh_publish_hostkeys", "allow_public_ssh_keys",
        "ssh_quiet_keygen", "authkey_hash", "ssh_fp_console_blacklist", "ssh_key_console_blacklist",
    ),
    "a sandbox does not boot: it is ready when it is handed over": (
        "power_state", "grub_dpkg", "grub-dpkg", "kernel_modules", "package_reboot_if_required",
    ),
    "a sandbox has no network device: network=Network(allow=[...]) says what it may reach": (
        "network", "resolv_conf", "manage_resolv_conf", "wireguard", "updates",
    ),
    "it belongs into the image: `sloplet image build`": (
        "apt", "apt_pipelining", "yum_repos", "yum_repo_dir", "zypper", "apk_repos", "snap", "ca_certs", "ca-certs",
        "ansible", "chef", "puppet", "salt_minion", "mcollective", "landscape", "ubuntu_advantage", "ubuntu_pro",
        "rh_subscription", "drivers", "lxd", "fan", "spacewalk", "keyboard",
    ),
    "it is about the machine below, which a sandbox does not have": (
        "ntp", "rsyslog", "random_seed", "phone_home", "output", "vendor_data", "datasource", "system_info",
        "cloud_init_modules", "cloud_config_modules", "cloud_final_modules", "byobu_by_default", "reporting",
        "autoinstall",
    ),
    "nobody logs in to a sandbox with a password: users: has passwd, for a hash": ("chpasswd", "password"),
    "its /etc/hosts has its host name already": ("manage_etc_hosts",),
    "a sandbox says itself who its own user is: user=": ("user",),
    "one file is applied, as it is": ("include", "merge_how", "merge_type"),
    "a sandbox has one host name: write hostname:": ("prefer_fqdn_over_hostname", "preserve_hostname"),
}  # fmt: skip

SENSELESS = {key: why for why, keys in _REASONS.items() for key in keys}

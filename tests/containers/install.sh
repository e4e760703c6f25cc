#!/usr/bin/env bash
# What tests/containers needs, on Debian and as root: buildah, mmdebstrap and, where there is none, Apptainer.
#
#     tests/containers/install.sh [PREFIX]      then PATH=PREFIX/usr/bin:$PATH (default: .apptainer in this project)
#
# Debian 12 has no Apptainer: sid's package is unpacked under PREFIX with the libraries that it was linked against, because
# to install it would pull the whole system up to sid.
set -euo pipefail
prefix=$(realpath -m "${1:-$(dirname "$0")/../../.apptainer}")
install() { apt-get -o DPkg::Lock::Timeout=900 -qq install -y --no-install-recommends "$@" > /dev/null; }
apt-get -o DPkg::Lock::Timeout=900 -qq update
install buildah mmdebstrap ca-certificates
command -v apptainer || test -x "$prefix/usr/bin/apptainer" && exit

install patchelf squashfs-tools squashfuse fuse3 uidmap
scratch=$(mktemp -d)
chmod 755 "$scratch"
trap 'rm -rf "$scratch"' EXIT
mirror=$(awk '/^URIs:/ {print $2; exit}' /etc/apt/sources.list.d/debian.sources)
mkdir -p "$scratch"/state/lists/partial "$scratch"/cache/archives/partial "$scratch"/deb "$scratch"/files
echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror sid main" > "$scratch/sources.list"
sid=(-o Dir::Etc::SourceList="$scratch/sources.list" -o Dir::Etc::SourceParts=/dev/null -o Dir::Etc::PreferencesParts=/dev/null
     -o Dir::State="$scratch/state" -o Dir::State::status=/var/lib/dpkg/status -o Dir::Cache="$scratch/cache" -o APT::Sandbox::User=root)
apt-get "${sid[@]}" -qq update
(cd "$scratch/deb" && apt-get "${sid[@]}" -qq download apptainer libc6 libgcc-s1 libseccomp2 libsqlite3-0 zlib1g)
for package in "$scratch"/deb/*.deb; do dpkg -x "$package" "$scratch/files"; done

libraries=usr/lib/x86_64-linux-gnu
rm -rf "$prefix"
mkdir -p "$prefix/usr/bin" "$prefix/$libraries" "$prefix/runtime"
cp -a "$scratch/files/usr/bin/apptainer" "$prefix/usr/bin/"
cp -a "$scratch/files/$libraries/apptainer" "$prefix/$libraries/"
cp -a "$scratch/files/etc" "$prefix/usr/etc"
cp -a "$scratch/files/var" "$prefix/usr/var"
cp -a "$scratch/files/$libraries"/{ld-linux-x86-64.so.2,libc.so.6,libm.so.6,libresolv.so.2,libnss_*.so*,libgcc_s.so*} \
      "$scratch/files/$libraries"/{libseccomp.so*,libsqlite3.so*,libz.so*} "$prefix/runtime/"
ln -s ../etc "$prefix/usr/lib/etc" # the starter computes its prefix one level deeper
ln -s ../var "$prefix/usr/lib/var"
for binary in "$prefix/usr/bin/apptainer" "$prefix/$libraries/apptainer/bin/starter"; do
    patchelf --set-interpreter "$prefix/runtime/ld-linux-x86-64.so.2" --force-rpath --set-rpath "$prefix/runtime" "$binary"
done
"$prefix/usr/bin/apptainer" --version

#!/usr/bin/env bash
# Runs a command on software Vulkan: `tools/vulkan.sh build/linux-x86_64 slowar devices`.
#
# Builds libslowar with ggml's Vulkan backend in build/vulkan, with the ggml that `make lib` has in
# the folder named first, and installs what is missing for it and Mesa's llvmpipe, a Vulkan device
# on any CPU. For Debian and its kin, as root the first time; the rest is in .venv already.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
tree="$root/build/vulkan"
ggml="$(cd "$1" && pwd)"
shift
# Two releases of CMake in turn on one folder would compile all of it again.
export PATH="$root/.venv/bin:$PATH"

packages=(glslc libvulkan-dev mesa-vulkan-drivers spirv-headers)

# ggml wants vk::LayerSettingEXT, which bookworm's headers lack. Trixie's are the same on every
# processor.
headers_deb=libvulkan-dev_1.4.309.0-1_amd64.deb
headers_sha256=8d329d465e16168afff58b1bd0dd6db46aac2cc3f56054a481b25a04e90b345a

fail() {
    printf 'software Vulkan: %s\n' "$1" >&2
    exit 1
}

is_new_enough() { grep -qs LayerSettingEXT "$1/vulkan/vulkan_structs.hpp"; }

fetch_headers() {
    local mirror
    mirror="$(apt-get indextargets --format '$(SITE)' 'Created-By: Packages' 'Label: Debian' | sed -n 1p)"
    [ -n "$mirror" ] || fail "apt knows no Debian mirror to fetch $headers_deb from; run 'apt-get update', or install a newer libvulkan-dev."
    # apt's own fetcher: it goes the way that apt is set up to go, and checks the hash.
    /usr/lib/apt/apt-helper download-file "$mirror/pool/main/v/vulkan-loader/$headers_deb" \
        "$tree/$headers_deb" "SHA256:$headers_sha256"
    rm -rf "$tree/headers.new"
    dpkg-deb --extract "$tree/$headers_deb" "$tree/headers.new"
    mv "$tree/headers.new" "$tree/headers"
    rm "$tree/$headers_deb"
}

if ! dpkg --status "${packages[@]}" >/dev/null 2>&1; then
    [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null ||
        fail "the packages ${packages[*]} (names of Debian and Ubuntu) are needed: install them, or run this as root where there is apt-get."
    apt-get -q update
    DEBIAN_FRONTEND=noninteractive apt-get -q install --yes --no-install-recommends "${packages[@]}"
fi

mkdir -p "$tree"
headers=/usr/include
if ! is_new_enough "$headers"; then
    headers="$tree/headers/usr/include"
    is_new_enough "$headers" || fetch_headers
fi

# What cmake/ggml.cmake would unpack there: the same ggml need not be downloaded twice.
ln -sfn "$ggml"/ggml-source-* "$tree/"
cmake -S "$root" -B "$tree" -G Ninja -DGGML_VULKAN=ON -DVulkan_INCLUDE_DIR="$headers" >"$tree/configure.log" ||
    { cat "$tree/configure.log" && fail "CMake could not configure; its words are above."; }
CMAKE_BUILD_PARALLEL_LEVEL="${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc)}" cmake --build "$tree" --target slowar

mesa="$(dpkg-query --show --showformat '${Version}' mesa-vulkan-drivers)"
if dpkg --compare-versions "$mesa" lt 23.1; then
    "${CC:-cc}" -shared -fPIC -O1 -I "$headers" "$root/tools/keep_buffers.c" -o "$tree/keep_buffers.so"
    export LD_PRELOAD="$tree/keep_buffers.so${LD_PRELOAD:+ $LD_PRELOAD}"
fi

# ggml takes no device that is a CPU unless it is told which. Halves are emulated there: slow, and
# with sums in halves, 1e-2 off.
export GGML_VK_VISIBLE_DEVICES=0
export GGML_VK_DISABLE_F16=1
# Compiling a shader takes llvmpipe seconds.
export MESA_SHADER_CACHE_DIR="$tree/shaders"
export SLOWAR_LIBRARY="$tree/lib/libslowar.so"
export SLOWAR_TEST_BACKEND=vulkan
exec "$@"

/* The ROCm functions whose calls the tests read. Every other one that CuPy imports is made by rocm_stubs.py and returns 0.
   Freestanding: there is nothing to link with. Device memory is an array here. */
typedef long long word;
typedef struct { const char *name; word words[64]; } call;

call stub_calls[64];
int stub_count;
int stub_parameter_sizes[64]; /* set by the test: what the next kernel's parameters are */

static unsigned char memory[1 << 24] __attribute__((aligned(4096)));
static unsigned long used;

static word *record(const char *name) {
    call *c = &stub_calls[stub_count++ % 64];
    c->name = name;
    return c->words;
}

static word float_bits(const void *p) { return *(const int *)p; }

int hipGetDevice(int *device) { *device = 0; return 0; }
int hipGetDeviceCount(int *count) { *count = 1; return 0; }
int hipRuntimeGetVersion(int *version) { *version = 70051831; return 0; }
int hipGetDevicePropertiesR0600(char *properties, int device) {
    static const char arch[] = "gfx942:sramecc+:xnack-";
    for (int i = 0; i < 1472; i++) properties[i] = 0;
    for (int i = 0; arch[i]; i++) properties[1160 + i] = arch[i]; /* hipDeviceProp_tR0600.gcnArchName */
    return 0;
}
int hipMalloc(void **p, unsigned long size) {
    if (used + size > sizeof memory) return 2; /* hipErrorOutOfMemory */
    *p = memory + used;
    used += (size + 511) / 512 * 512;
    return 0;
}
int hipblasCreate(void **handle) { *handle = (void *)0x10; return 0; }
int hipblasSetStream(void *handle, void *stream) { word *w = record("hipblasSetStream"); w[0] = (word)stream; return 0; }

int hipblasGemmEx(void *handle, int ta, int tb, int m, int n, int k, const void *alpha, const void *a, int a_type, int lda,
                  const void *b, int b_type, int ldb, const void *beta, void *c, int c_type, int ldc, int compute, int algo) {
    word all[] = {ta, tb, m, n, k, float_bits(alpha), (word)a, a_type, lda, 0, (word)b, b_type, ldb, 0, float_bits(beta),
                  (word)c, c_type, ldc, 0, 1, compute, algo};
    word *w = record("hipblasGemmEx");
    for (int i = 0; i < 22; i++) w[i] = all[i];
    return 0;
}

int hipblasGemmStridedBatchedEx(void *handle, int ta, int tb, int m, int n, int k, const void *alpha, const void *a,
                                int a_type, int lda, word step_a, const void *b, int b_type, int ldb, word step_b,
                                const void *beta, void *c, int c_type, int ldc, word step_c, int batch, int compute,
                                int algo) {
    word all[] = {ta, tb, m, n, k, float_bits(alpha), (word)a, a_type, lda, step_a, (word)b, b_type, ldb, step_b,
                  float_bits(beta), (word)c, c_type, ldc, step_c, batch, compute, algo};
    word *w = record("hipblasGemmStridedBatchedEx");
    for (int i = 0; i < 22; i++) w[i] = all[i];
    return 0;
}

int hipModuleLoadData(void **module, const void *image) {
    word *w = record("hipModuleLoadData");
    w[0] = *(const int *)image;
    *module = (void *)0x77;
    return 0;
}
static char kernel_name[128];
int hipModuleGetFunction(void **function, void *module, const char *name) {
    int i = 0;
    for (; name[i] && i < 127; i++) kernel_name[i] = name[i];
    kernel_name[i] = 0;
    *function = (void *)0x88;
    return 0;
}
int hipModuleLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                          unsigned shared, void *stream, void **parameters, void **extra) {
    word all[] = {gx, gy, gz, bx, by, bz, shared, (word)stream};
    word *w = record(kernel_name);
    for (int i = 0; i < 8; i++) w[i] = all[i];
    for (int i = 0; i < 56 && stub_parameter_sizes[i]; i++)
        w[8 + i] = stub_parameter_sizes[i] == 4 ? *(int *)parameters[i] : *(word *)parameters[i];
    return 0;
}
